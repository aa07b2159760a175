// The torch side of the quantizer: checks and outputs. The schema is in fa3/ops.py; the arguments follow it.
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/fp8_format.h"
#include "ops/torch_op.h"
#include "quantize/quantize.h"

namespace fa3 {
namespace {

// The tensor, or a copy of it if it is not contiguous or not 16-byte aligned, as the kernels' vector loads require.
Tensor aligned(Tensor const& tensor) {
  if (tensor.is_contiguous() && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0) {
    return tensor;
  }
  Tensor copy = torch::stable::new_empty(tensor, tensor.sizes());
  torch::stable::copy_(copy, tensor);
  return copy;
}

// Checks the rotary tables. Both are given, or neither.
void check_tables(ArgumentCheck const& check, Tensor const& x, std::optional<Tensor> const& cos,
                  std::optional<Tensor> const& sin) {
  check(cos.has_value() == sin.has_value(), "sin", "be given with cos, and only then",
        sin.has_value() ? "sin alone" : "cos alone");
  if (!cos.has_value()) {
    return;
  }
  ScalarType const type = cos->scalar_type();
  check(type == ScalarType::Float || type == x.scalar_type(), "cos", "be float32 or have x's dtype", name_of(type));
  check_tensor(check, "cos", *cos, "x", x.get_device(), type);
  check(cos->dim() == 2 && cos->size(0) >= x.size(1), "cos",
        "have the shape (at least " + std::to_string(x.size(1)) + ", rotary_dim / 2)", shape_of(*cos));
  int64_t const rotary_dim = 2 * cos->size(1);
  check(rotary_dim >= 16 && rotary_dim <= x.size(3) && rotary_dim % 16 == 0, "cos",
        "have a rotary_dim that is a multiple of 16 from 16 to x's head_dim " + std::to_string(x.size(3)),
        std::to_string(rotary_dim));
  check(sin->scalar_type() == type, "sin", "have cos's dtype " + name_of(type), dtype_of(*sin));
  check_tensor(check, "sin", *sin, "x", x.get_device(), type);
  check_shape(check, "sin", *sin, {cos->size(0), cos->size(1)}, "have cos's shape " + shape_of(*cos));
}

void check_signs(ArgumentCheck const& check, Tensor const& x, Tensor const& signs) {
  check_tensor(check, "signs", signs, "x", x.get_device(), ScalarType::Float);
  check(signs.dim() == 1 && (signs.size(0) == 64 || signs.size(0) == 128 || signs.size(0) == 256) &&
            signs.size(0) >= x.size(3),
        "signs", "have 64, 128 or 256 entries, at least x's head_dim " + std::to_string(x.size(3)), shape_of(signs));
}

std::tuple<Tensor, Tensor, Tensor> quantize_fp8(Tensor const& x, std::optional<Tensor> const& signs,
                                                std::optional<Tensor> const& cos, std::optional<Tensor> const& sin,
                                                bool rotary_interleaved, bool smooth, int64_t block_size,
                                                bool transpose) {
  ArgumentCheck const check{"quantize_fp8"};
  Dtype const dtype = check_16_bits(check, "x", x);
  check_tensor(check, "x", x, "x", x.get_device(), x.scalar_type());
  check_input(check, "x", x);
  int64_t const batch = x.size(0), seqlen = x.size(1), num_heads = x.size(2), head_dim = x.size(3);
  check_head_dim(check, "x", head_dim);
  check_tables(check, x, cos, sin);
  if (signs.has_value()) {
    check_signs(check, x, *signs);
  }
  check(block_size == 0 || block_size == kFp8ScaleRows, "block_size", "be 0 or " + std::to_string(kFp8ScaleRows),
        std::to_string(block_size));
  check(!transpose || (!signs.has_value() && !cos.has_value() && !smooth), "transpose",
        "be false with signs, cos or smooth: it is for V, which is only cast", "true");
  check_hopper(check, "x", x.get_device());
  CurrentDevice const current_device(x.get_device());

  int64_t const width = signs.has_value() ? signs->size(0) : head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  int64_t const columns = signs.has_value() ? width : head_dim;
  int64_t const num_blocks = (seqlen + kFp8ScaleRows - 1) / kFp8ScaleRows;
  auto const new_x8 = [&](int64_t columns) {
    std::vector<int64_t> const shape = transpose ? std::vector{batch, num_heads, columns, num_blocks * kFp8ScaleRows}
                                                 : std::vector{batch, seqlen, num_heads, columns};
    return torch::stable::new_empty(x, shape, ScalarType::Float8_e4m3fn);
  };
  Tensor descale = torch::stable::new_empty(x, {batch, num_heads, block_size == 0 ? 1 : num_blocks}, ScalarType::Float);
  Tensor mean = smooth ? torch::stable::new_empty(x, {batch, num_heads, head_dim}, ScalarType::Float)
                       : torch::stable::new_empty(x, {0}, ScalarType::Float);
  if (x.numel() == 0) {  // without rows the largest absolute value is 0, and so is the mean
    torch::stable::fill_(descale, 1);
    torch::stable::fill_(mean, 0);
    return {new_x8(columns), descale, mean};
  }

  // TMA writes rows whose strides are multiples of 16 bytes. Other widths are copied from wider rows.
  int64_t const columns_for_tma = transpose ? columns : (columns + 15) / 16 * 16;
  Tensor x8 = new_x8(columns_for_tma);
  auto const scratch = [&](bool is_needed, int64_t per_head) {
    int64_t const size = is_needed ? per_head : 0;
    return torch::stable::new_empty(x, {batch, num_heads, size}, ScalarType::Float);
  };
  Tensor const column_sums = scratch(smooth, num_blocks * head_dim);
  Tensor const amax = scratch(block_size == 0, 1);
  auto const floats = [](Tensor const& tensor) {
    return tensor.numel() == 0 ? nullptr : static_cast<float*>(tensor.data_ptr());
  };
  Tensor const x_aligned = for_tma(x);
  auto const aligned_if_given = [](std::optional<Tensor> const& tensor) {
    return tensor.has_value() ? std::optional(aligned(*tensor)) : std::nullopt;
  };
  auto const cos_aligned = aligned_if_given(cos), sin_aligned = aligned_if_given(sin),
             signs_aligned = aligned_if_given(signs);
  QuantizeParams const params{
      .x = tensor_arg(x_aligned),
      .rotary =
          {
              .cos = cos.has_value() ? cos_aligned->data_ptr() : nullptr,
              .sin = sin.has_value() ? sin_aligned->data_ptr() : nullptr,
              .is_float = cos.has_value() && cos->scalar_type() == ScalarType::Float,
              .interleaved = rotary_interleaved,
              .dim = cos.has_value() ? static_cast<int>(2 * cos->size(1)) : 0,
          },
      .mean = floats(mean),
      .signs = signs.has_value() ? floats(*signs_aligned) : nullptr,
      .x8 = tensor_arg(transpose ? torch::stable::transpose(x8, 1, 2) : x8),
      .transpose = transpose,
      .descale = floats(descale),
      .column_sums = floats(column_sums),
      .amax = floats(amax),
      .batch = static_cast<int>(batch),
      .seqlen = static_cast<int>(seqlen),
      .num_heads = static_cast<int>(num_heads),
      .head_dim = static_cast<int>(head_dim),
      .width = static_cast<int>(width),
      .columns = static_cast<int>(columns),
      .num_sms = device_properties(x.get_device()).num_sms,
  };
  (dtype == Dtype::kBFloat16 ? quantize::quantize_bf16 : quantize::quantize_fp16)(params,
                                                                                  current_stream(x.get_device()));
  if (columns != columns_for_tma) {
    Tensor packed = new_x8(columns);
    torch::stable::copy_(packed, torch::stable::narrow(x8, 3, 0, columns));
    return {packed, descale, mean};
  }
  return {x8, descale, mean};
}

}  // namespace
}  // namespace fa3

STABLE_TORCH_LIBRARY_IMPL(fa3, CUDA, m) { m.impl("quantize_fp8", TORCH_BOX(&fa3::quantize_fp8)); }
