// The torch side of attention: every argument check, output allocation, device and stream. The schemas are in
// fa3/ops.py; the arguments of these functions follow them.
#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "bwd/kernels.h"
#include "common/fp8_format.h"
#include "fwd/kernels.h"
#include "ops/mask_argument.h"
#include "ops/torch_op.h"

namespace fa3 {
namespace {

// What the arguments of a call say, once they are checked.
struct Call {
  char const* op;
  int device;
  Dtype dtype;
  SeqlenParams seqlen;
  MaskParams mask;
  ScoreParams scores;
  int num_heads_q;
  int num_heads_kv;
  int head_dim;
  int head_dim_v;
  bool v_transposed;

  std::vector<int64_t> q_shape() const { return {seqlen.batch, seqlen.seqlen_q, num_heads_q, head_dim}; }
  std::vector<int64_t> out_shape() const { return {seqlen.batch, seqlen.seqlen_q, num_heads_q, head_dim_v}; }
  std::vector<int64_t> lse_shape() const { return {seqlen.batch, num_heads_q, seqlen.seqlen_q}; }
};

int64_t num_scale_blocks(int64_t rows) { return (rows + kFp8ScaleRows - 1) / kFp8ScaleRows; }

// The arguments that choose mask and scale, as the schemas have them.
struct Options {
  double softmax_scale;
  int64_t window_left;
  int64_t window_right;
  int64_t attention_chunk;
};

// The kernels have one head_dim. A head_dim_v of its own is refused here and nowhere else.
void check_head_dims(ArgumentCheck const& check, int64_t head_dim, int64_t head_dim_v, bool fp8) {
  check_head_dim(check, "q", head_dim, fp8 ? 16 : 8);  // 16 bytes, for TMA
  check(head_dim_v == head_dim, "v", "have q's head_dim " + std::to_string(head_dim), std::to_string(head_dim_v));
}

Call check_call(char const* op, Tensor const& q, Tensor const& k, Tensor const& v, Options const& options,
                bool fp8 = false, bool v_transposed = false) {
  ArgumentCheck const check{op};
  if (fp8) {
    check(q.scalar_type() == ScalarType::Float8_e4m3fn, "q", "be float8_e4m3fn", dtype_of(q));
  }
  Dtype const dtype = fp8 ? Dtype::kFloat8E4M3 : check_16_bits(check, "q", q);
  auto const check_qkv = [&](char const* name, Tensor const& tensor) {
    check_tensor(check, name, tensor, "q", q.get_device(), q.scalar_type());
    check_input(check, name, tensor);
  };
  check_qkv("q", q);
  check_qkv("k", k);
  check_qkv("v", v);

  int64_t const batch = q.size(0), seqlen_q = q.size(1), num_heads_q = q.size(2), head_dim = q.size(3);
  int64_t const seqlen_k = k.size(1), num_heads_kv = k.size(2);
  int64_t const head_dim_v = v.size(v_transposed ? 2 : 3);
  check(k.size(0) == batch && k.size(3) == head_dim, "k", "have q's batch and head_dim", shape_of(k));
  if (v_transposed) {
    check_shape(check, "v", v, {batch, num_heads_kv, head_dim_v, num_scale_blocks(seqlen_k) * kFp8ScaleRows},
                "have the shape (batch, num_heads_kv, head_dim, whole blocks of keys) of k " + shape_of(k));
  } else {
    check_shape(check, "v", v, {batch, seqlen_k, num_heads_kv, head_dim_v},
                "have the batch, seqlen and heads of k " + shape_of(k));
  }
  check_head_dims(check, head_dim, head_dim_v, fp8);
  check(num_heads_q >= 1 && num_heads_kv >= 1 && num_heads_q % num_heads_kv == 0, "q",
        "have a multiple of k's " + std::to_string(num_heads_kv) + " heads", std::to_string(num_heads_q));
  check(options.softmax_scale >= 1e-37 && options.softmax_scale <= 1e38, "softmax_scale",
        "be from 1e-37 to 1e38 (float32)", std::to_string(options.softmax_scale));
  MaskParams const mask =
      make_mask(check, options.window_left, options.window_right, options.attention_chunk, seqlen_q, seqlen_k);
  check(!fp8 || mask.is_causal_or_none(), "window_left, window_right and attention_chunk",
        "be a causal mask or hide no key for float8_e4m3fn",
        std::to_string(options.window_left) + ", " + std::to_string(options.window_right) + " and " +
            std::to_string(options.attention_chunk));
  check_hopper(check, "q", q.get_device());
  return {
      .op = op,
      .device = q.get_device(),
      .dtype = dtype,
      .seqlen = {.batch = static_cast<int>(batch),
                 .seqlen_q = static_cast<int>(seqlen_q),
                 .seqlen_k = static_cast<int>(seqlen_k)},
      .mask = mask,
      .scores = ScoreParams(static_cast<float>(options.softmax_scale)),
      .num_heads_q = static_cast<int>(num_heads_q),
      .num_heads_kv = static_cast<int>(num_heads_kv),
      .head_dim = static_cast<int>(head_dim),
      .head_dim_v = static_cast<int>(head_dim_v),
      .v_transposed = v_transposed,
  };
}

template <class Kernel>
Kernel const& check_built(Kernel const* kernel, Call const& call, ScalarType type) {
  FA3_CHECK(kernel != nullptr, std::string(call.op) + ": this build has no kernel for " + name_of(type) +
                                   ", head_dim " + std::to_string(call.head_dim) + ", head_dim_v " +
                                   std::to_string(call.head_dim_v) + ", seqlen_k " +
                                   std::to_string(call.seqlen.seqlen_k) + (call.v_transposed ? ", v transposed" : "") +
                                   " (python -m fa3 lists its kernels)");
  return *kernel;
}

// Returns out and lse, written by the kernel, or here if there is nothing to compute.
std::tuple<Tensor, Tensor> run_forward(Call const& call, Tensor const& q, Tensor const& k, Tensor const& v,
                                       ScalarType out_type, Fp8Params const& fp8 = {}) {
  fwd::Kernel const& kernel = check_built(fwd::Kernels::select(fwd::Problem{
                                              .dtype = call.dtype,
                                              .head_dim = call.head_dim,
                                              .head_dim_v = call.head_dim_v,
                                              .seqlen_k = call.seqlen.seqlen_k,
                                              .mask = call.mask,
                                              .v_transposed = call.v_transposed,
                                          }),
                                          call, q.scalar_type());
  CurrentDevice const current_device(call.device);

  Tensor out = torch::stable::new_empty(q, call.out_shape(), out_type);
  Tensor lse = torch::stable::new_empty(q, call.lse_shape(), ScalarType::Float);
  if (out.numel() == 0) {
    return {out, lse};
  }
  if (call.seqlen.seqlen_k == 0) {  // no row has a key
    torch::stable::fill_(out, 0);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    return {out, lse};
  }

  Tensor const q_tma = for_tma(q), k_tma = for_tma(k), v_tma = for_tma(v);
  kernel.launch(
      {
          .q = tensor_arg(q_tma),
          .k = tensor_arg(k_tma),
          .v = tensor_arg(call.v_transposed ? torch::stable::transpose(v_tma, 1, 2) : v_tma),
          .out = tensor_arg(out),
          .lse = static_cast<float*>(lse.data_ptr()),
          .seqlen = call.seqlen,
          .mask = call.mask,
          .scores = call.scores,
          .num_heads_q = call.num_heads_q,
          .num_heads_kv = call.num_heads_kv,
          .head_dim = call.head_dim,
          .head_dim_v = call.head_dim_v,
          .num_sms = device_properties(call.device).num_sms,
          .fp8 = fp8,
      },
      current_stream(call.device));
  return {out, lse};
}

std::tuple<Tensor, Tensor> forward(Tensor const& q, Tensor const& k, Tensor const& v, double softmax_scale,
                                   int64_t window_left, int64_t window_right, int64_t attention_chunk,
                                   bool /*deterministic*/) {
  Call const call = check_call("fwd", q, k, v, {softmax_scale, window_left, window_right, attention_chunk});
  return run_forward(call, q, k, v, q.scalar_type());
}

// Checks scales by (batch, head, block): one per kFp8ScaleRows rows, or one for all rows.
BlockScales block_scales(ArgumentCheck const& check, char const* name, Tensor const& scales, int device, int64_t batch,
                         int64_t num_heads, int64_t seqlen) {
  check_tensor(check, name, scales, "q", device, ScalarType::Float);
  int64_t const num_blocks = num_scale_blocks(seqlen);
  check(scales.dim() == 3 && scales.size(0) == batch && scales.size(1) == num_heads &&
            (scales.size(2) == num_blocks || scales.size(2) == 1),
        name,
        "have the shape (" + std::to_string(batch) + ", " + std::to_string(num_heads) + ", " +
            std::to_string(num_blocks) + " or 1)",
        shape_of(scales));
  int64_t last = 0;
  for (int64_t i = 0; i < 3; ++i) {
    last += std::max<int64_t>(scales.size(i) - 1, 0) * scales.stride(i);
  }
  check(last >= 0 && last <= std::numeric_limits<int>::max(), name, "span fewer than 2^31 elements",
        std::to_string(last));
  auto const stride = [&](int64_t dim) { return scales.size(dim) > 1 ? static_cast<int>(scales.stride(dim)) : 0; };
  return {static_cast<float const*>(scales.data_ptr()), stride(0), stride(1), stride(2)};
}

std::tuple<Tensor, Tensor> forward_fp8(Tensor const& q, Tensor const& k, Tensor const& v, Tensor const& q_descale,
                                       Tensor const& k_descale, Tensor const& v_descale, double softmax_scale,
                                       int64_t window_left, int64_t window_right, int64_t attention_chunk,
                                       bool out_fp16, bool v_transposed) {
  Call const call = check_call("fwd_fp8", q, k, v, {softmax_scale, window_left, window_right, attention_chunk},
                               /*fp8=*/true, v_transposed);
  ArgumentCheck const check{call.op};
  // q may have a scale per query head, or one per KV head as upstream's.
  bool const per_query_head = q_descale.dim() == 3 && q_descale.size(1) == call.num_heads_q;
  int const q_descale_heads = per_query_head ? call.num_heads_q : call.num_heads_kv;
  auto const scales = [&](char const* name, Tensor const& tensor, int num_heads, int seqlen) {
    return block_scales(check, name, tensor, call.device, call.seqlen.batch, num_heads, seqlen);
  };
  return run_forward(call, q, k, v, out_fp16 ? ScalarType::Half : ScalarType::BFloat16,
                     {
                         .q_descale = scales("q_descale", q_descale, q_descale_heads, call.seqlen.seqlen_q),
                         .k_descale = scales("k_descale", k_descale, call.num_heads_kv, call.seqlen.seqlen_k),
                         .v_descale = scales("v_descale", v_descale, call.num_heads_kv, call.seqlen.seqlen_k),
                         .q_descale_group = call.num_heads_q / q_descale_heads,
                         .out_fp16 = out_fp16,
                     });
}

// dout and out may have any strides. A missing dlse is zero.
std::tuple<Tensor, Tensor, Tensor> backward(Tensor const& dout, std::optional<Tensor> const& dlse, Tensor const& q,
                                            Tensor const& k, Tensor const& v, Tensor const& out, Tensor const& lse,
                                            double softmax_scale, int64_t window_left, int64_t window_right,
                                            int64_t attention_chunk, bool deterministic) {
  Call const call = check_call("bwd", q, k, v, {softmax_scale, window_left, window_right, attention_chunk});
  ArgumentCheck const check{call.op};
  auto const check_like_out = [&](char const* name, Tensor const& tensor) {
    check_tensor(check, name, tensor, "q", call.device, q.scalar_type());
    check_shape(check, name, tensor, call.out_shape(),
                "have the shape (batch, seqlen_q, num_heads_q, head_dim_v) " + shape_text(call.out_shape()));
  };
  auto const check_like_lse = [&](char const* name, Tensor const& tensor) {
    check_tensor(check, name, tensor, "q", call.device, ScalarType::Float);
    check_shape(check, name, tensor, call.lse_shape(),
                "have the shape (batch, num_heads_q, seqlen_q) " + shape_text(call.lse_shape()));
  };
  check_like_out("dout", dout);
  check_like_out("out", out);
  check_like_lse("lse", lse);
  if (dlse.has_value()) {
    check_like_lse("dlse", *dlse);
  }
  bwd::Kernel const& kernel = check_built(bwd::Kernels::select(bwd::Problem{
                                              .dtype = call.dtype,
                                              .head_dim = call.head_dim,
                                              .head_dim_v = call.head_dim_v,
                                          }),
                                          call, q.scalar_type());
  CurrentDevice const current_device(call.device);

  Tensor dq = torch::stable::new_empty(q, q.sizes());
  Tensor dk = torch::stable::new_empty(k, k.sizes());
  Tensor dv = torch::stable::new_empty(v, v.sizes());
  if (q.numel() == 0 || k.numel() == 0) {  // no query sees a key
    for (Tensor* gradient : {&dq, &dk, &dv}) {
      torch::stable::fill_(*gradient, 0);
    }
    return {dq, dk, dv};
  }

  int64_t const tile_m = kernel.info.tile_m;
  int64_t const num_m_blocks = (call.seqlen.seqlen_q + tile_m - 1) / tile_m;
  auto const scratch = [&](int64_t per_m_block, ScalarType type) {
    return torch::stable::new_empty(q, {call.seqlen.batch, call.num_heads_q, num_m_blocks, per_m_block}, type);
  };
  Tensor const dq_accum = scratch(tile_m * kernel.info.head_dim, ScalarType::Float);
  Tensor const lse_log2 = scratch(tile_m, ScalarType::Float);
  Tensor const dsum = scratch(tile_m, ScalarType::Float);
  Tensor const dq_semaphore = scratch(deterministic ? kernel.info.consumer_warpgroups : 0, ScalarType::Int);

  Tensor const q_tma = for_tma(q), k_tma = for_tma(k), v_tma = for_tma(v);
  Tensor const out_tma = for_tma(out), dout_tma = for_tma(dout);
  Tensor const lse_packed = torch::stable::contiguous(lse);
  std::optional<Tensor> const dlse_packed =
      dlse.has_value() ? std::optional(torch::stable::contiguous(*dlse)) : std::nullopt;
  kernel.launch(
      {
          .q = tensor_arg(q_tma),
          .k = tensor_arg(k_tma),
          .v = tensor_arg(v_tma),
          .out = tensor_arg(out_tma),
          .dout = tensor_arg(dout_tma),
          .dq = tensor_arg(dq),
          .dk = tensor_arg(dk),
          .dv = tensor_arg(dv),
          .lse = static_cast<float const*>(lse_packed.data_ptr()),
          .dlse = dlse_packed.has_value() ? static_cast<float const*>(dlse_packed->data_ptr()) : nullptr,
          .dq_accum = static_cast<float*>(dq_accum.data_ptr()),
          .lse_log2 = static_cast<float*>(lse_log2.data_ptr()),
          .dsum = static_cast<float*>(dsum.data_ptr()),
          .dq_semaphore = deterministic ? static_cast<int*>(dq_semaphore.data_ptr()) : nullptr,
          .seqlen = call.seqlen,
          .mask = call.mask,
          .scores = call.scores,
          .num_heads_q = call.num_heads_q,
          .num_heads_kv = call.num_heads_kv,
          .head_dim = call.head_dim,
          .head_dim_v = call.head_dim_v,
          .deterministic = deterministic,
          .num_sms = device_properties(call.device).num_sms,
      },
      current_stream(call.device));
  return {dq, dk, dv};
}

}  // namespace
}  // namespace fa3

STABLE_TORCH_LIBRARY_IMPL(fa3, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&fa3::forward));
  m.impl("fwd_fp8", TORCH_BOX(&fa3::forward_fp8));
  m.impl("bwd", TORCH_BOX(&fa3::backward));
}
