// The torch side of attention: op schemas, every argument check, output allocation, device and stream.
#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "bwd/kernels.h"
#include "fwd/kernels.h"
#include "fwd/tiles.h"
#include "ops/torch_op.h"

namespace fa3 {
namespace {

// What q, k and v say of a call.
struct Problem {
  int64_t batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim;
  Dtype dtype;
  int device;
};

Problem check_inputs(ArgumentCheck const& check, Tensor const& q, Tensor const& k, Tensor const& v,
                     double softmax_scale, bool fp8 = false, bool v_transposed = false) {
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

  Problem const problem{
      .batch = q.size(0),
      .seqlen_q = q.size(1),
      .seqlen_k = k.size(1),
      .num_heads_q = q.size(2),
      .num_heads_kv = k.size(2),
      .head_dim = q.size(3),
      .dtype = dtype,
      .device = q.get_device(),
  };
  check_head_dim(check, "q", problem.head_dim, fp8 ? 16 : 8);  // 16 bytes, for TMA
  check(k.size(0) == problem.batch && k.size(3) == problem.head_dim, "k", "have q's batch and head_dim", shape_of(k));
  if (v_transposed) {
    int64_t const num_keys = (problem.seqlen_k + kFp8BlockRows - 1) / kFp8BlockRows * kFp8BlockRows;
    check_shape(check, "v", v, {problem.batch, problem.num_heads_kv, problem.head_dim, num_keys},
                "have the shape (batch, num_heads_kv, head_dim, whole blocks of keys) of k " + shape_of(k));
  } else {
    check_shape(check, "v", v, {problem.batch, problem.seqlen_k, problem.num_heads_kv, problem.head_dim},
                "have k's shape " + shape_of(k));
  }
  check(problem.num_heads_q >= 1 && problem.num_heads_kv >= 1 && problem.num_heads_q % problem.num_heads_kv == 0, "q",
        "have a multiple of k's " + std::to_string(problem.num_heads_kv) + " heads",
        std::to_string(problem.num_heads_q));
  check(softmax_scale >= 1e-37 && softmax_scale <= 1e38, "softmax_scale", "be from 1e-37 to 1e38 (float32)",
        std::to_string(softmax_scale));

  check_hopper(check, "q", problem.device);
  return problem;
}

template <class Kernel>
void check_built(char const* op, Kernel const* kernel, Problem const& problem) {
  FA3_CHECK(kernel != nullptr, std::string(op) + ": this build has no kernel for head_dim " +
                                   std::to_string(problem.head_dim) + " of q's dtype");
}

// out and lse, written: by the kernel, or here where there is nothing to compute.
std::tuple<Tensor, Tensor> run_forward(char const* op, Problem const& problem, Tensor const& q, Tensor const& k,
                                       Tensor const& v, ScalarType out_type, double softmax_scale, bool causal,
                                       FwdParams params, bool v_transposed = false) {
  FwdKernel const* kernel = select_fwd_kernel(problem.dtype, problem.head_dim, problem.seqlen_k, causal, v_transposed);
  check_built(op, kernel, problem);
  CurrentDevice const current_device(problem.device);

  Tensor out = torch::stable::new_empty(q, q.sizes(), out_type);
  Tensor lse = torch::stable::new_empty(q, {problem.batch, problem.num_heads_q, problem.seqlen_q}, ScalarType::Float);
  if (out.numel() == 0) {
    return {out, lse};
  }
  if (problem.seqlen_k == 0) {  // no row has a key
    torch::stable::fill_(out, 0);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    return {out, lse};
  }

  Tensor const q_tma = for_tma(q), k_tma = for_tma(k), v_tma = for_tma(v);
  params.q = tensor_arg(q_tma);
  params.k = tensor_arg(k_tma);
  params.v = tensor_arg(v_transposed ? torch::stable::transpose(v_tma, 1, 2) : v_tma);
  params.out = tensor_arg(out);
  params.lse = static_cast<float*>(lse.data_ptr());
  params.batch = static_cast<int>(problem.batch);
  params.seqlen_q = static_cast<int>(problem.seqlen_q);
  params.seqlen_k = static_cast<int>(problem.seqlen_k);
  params.num_heads_q = static_cast<int>(problem.num_heads_q);
  params.num_heads_kv = static_cast<int>(problem.num_heads_kv);
  params.head_dim = static_cast<int>(problem.head_dim);
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.causal = causal;
  params.num_sms = device_properties(problem.device).num_sms;
  kernel->launch(params, current_stream(problem.device));
  return {out, lse};
}

// `deterministic` is the backward's: autograd carries it there.
std::tuple<Tensor, Tensor> fwd(Tensor const& q, Tensor const& k, Tensor const& v, double softmax_scale, bool causal,
                               bool /*deterministic*/) {
  Problem const problem = check_inputs({"fwd"}, q, k, v, softmax_scale);
  return run_forward("fwd", problem, q, k, v, q.scalar_type(), softmax_scale, causal, {});
}

// Scales by (batch, head, block): one per kFp8BlockRows rows, or one for all.
BlockScales block_scales(ArgumentCheck const& check, char const* name, Tensor const& scales, int device, int64_t batch,
                         int64_t num_heads, int64_t seqlen) {
  check_tensor(check, name, scales, "q", device, ScalarType::Float);
  int64_t const num_blocks = (seqlen + kFp8BlockRows - 1) / kFp8BlockRows;
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

std::tuple<Tensor, Tensor> fwd_fp8(Tensor const& q, Tensor const& k, Tensor const& v, Tensor const& q_descale,
                                   Tensor const& k_descale, Tensor const& v_descale, double softmax_scale, bool causal,
                                   bool out_fp16, bool v_transposed) {
  ArgumentCheck const check{"fwd_fp8"};
  Problem const problem = check_inputs(check, q, k, v, softmax_scale, /*fp8=*/true, v_transposed);
  // q may have a scale per query head, or one per KV head as upstream's.
  bool const per_query_head = q_descale.dim() == 3 && q_descale.size(1) == problem.num_heads_q;
  int64_t const q_scale_heads = per_query_head ? problem.num_heads_q : problem.num_heads_kv;
  auto const scales = [&](char const* name, Tensor const& tensor, int64_t num_heads, int64_t seqlen) {
    return block_scales(check, name, tensor, problem.device, problem.batch, num_heads, seqlen);
  };
  return run_forward("fwd_fp8", problem, q, k, v, out_fp16 ? ScalarType::Half : ScalarType::BFloat16, softmax_scale,
                     causal,
                     {
                         .q_scales = scales("q_descale", q_descale, q_scale_heads, problem.seqlen_q),
                         .k_scales = scales("k_descale", k_descale, problem.num_heads_kv, problem.seqlen_k),
                         .v_scales = scales("v_descale", v_descale, problem.num_heads_kv, problem.seqlen_k),
                         .q_scales_group = static_cast<int>(problem.num_heads_q / q_scale_heads),
                         .out_fp16 = out_fp16,
                     },
                     v_transposed);
}

// dout and out may have any strides; a dlse that is absent is zero.
std::tuple<Tensor, Tensor, Tensor> bwd(Tensor const& dout, std::optional<Tensor> const& dlse, Tensor const& q,
                                       Tensor const& k, Tensor const& v, Tensor const& out, Tensor const& lse,
                                       double softmax_scale, bool causal, bool deterministic) {
  ArgumentCheck const check{"bwd"};
  Problem const problem = check_inputs(check, q, k, v, softmax_scale);
  auto const check_like_q = [&](char const* name, Tensor const& tensor) {
    check_tensor(check, name, tensor, "q", problem.device, q.scalar_type());
    check_shape(check, name, tensor, {problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim},
                "have q's shape " + shape_of(q));
  };
  auto const check_like_lse = [&](char const* name, Tensor const& tensor) {
    check_tensor(check, name, tensor, "q", problem.device, ScalarType::Float);
    check_shape(check, name, tensor, {problem.batch, problem.num_heads_q, problem.seqlen_q},
                "have the shape (batch, num_heads_q, seqlen_q) of q " + shape_of(q));
  };
  check_like_q("dout", dout);
  check_like_q("out", out);
  check_like_lse("lse", lse);
  if (dlse.has_value()) {
    check_like_lse("dlse", *dlse);
  }
  BwdKernel const* kernel = select_bwd_kernel(problem.dtype, problem.head_dim);
  check_built("bwd", kernel, problem);
  CurrentDevice const current_device(problem.device);

  Tensor dq = torch::stable::new_empty(q, q.sizes());
  Tensor dk = torch::stable::new_empty(k, k.sizes());
  Tensor dv = torch::stable::new_empty(v, v.sizes());
  if (q.numel() == 0 || k.numel() == 0) {  // no query sees a key
    for (Tensor* gradient : {&dq, &dk, &dv}) {
      torch::stable::fill_(*gradient, 0);
    }
    return {dq, dk, dv};
  }

  // Causal with more queries than keys: the first queries see none. Their dq is 0, and whatever else is in their rows
  // reaches nothing: the kernels get the rows after them.
  int64_t const rows_without_keys = causal ? std::max<int64_t>(problem.seqlen_q - problem.seqlen_k, 0) : 0;
  int64_t const seqlen_q = problem.seqlen_q - rows_without_keys;
  auto const with_keys = [&](Tensor tensor, int64_t dim) {
    return rows_without_keys == 0 ? tensor : torch::stable::narrow(tensor, dim, rows_without_keys, seqlen_q);
  };
  if (rows_without_keys > 0) {
    Tensor dq_without_keys = torch::stable::narrow(dq, 1, 0, rows_without_keys);
    torch::stable::fill_(dq_without_keys, 0);
  }

  int64_t const tile_m = kernel->info.tile_m;
  int64_t const num_m_blocks = (seqlen_q + tile_m - 1) / tile_m;
  auto const scratch = [&](int64_t per_m_block, ScalarType type) {
    return torch::stable::new_empty(q, {problem.batch, problem.num_heads_q, num_m_blocks, per_m_block}, type);
  };
  Tensor const dq_accum = scratch(tile_m * kernel->info.head_dim, ScalarType::Float);
  Tensor const lse_log2 = scratch(tile_m, ScalarType::Float);
  Tensor const dsum = scratch(tile_m, ScalarType::Float);
  Tensor const dq_turn = scratch(deterministic ? kernel->info.consumer_warpgroups : 0, ScalarType::Int);

  Tensor const q_tma = for_tma(with_keys(q, 1)), k_tma = for_tma(k), v_tma = for_tma(v);
  Tensor const out_tma = for_tma(with_keys(out, 1)), dout_tma = for_tma(with_keys(dout, 1));
  Tensor const lse_packed = torch::stable::contiguous(with_keys(lse, 2));
  std::optional<Tensor> const dlse_packed =
      dlse.has_value() ? std::optional(torch::stable::contiguous(with_keys(*dlse, 2))) : std::nullopt;
  kernel->launch(
      {
          .q = tensor_arg(q_tma),
          .k = tensor_arg(k_tma),
          .v = tensor_arg(v_tma),
          .out = tensor_arg(out_tma),
          .dout = tensor_arg(dout_tma),
          .dq = tensor_arg(with_keys(dq, 1)),
          .dk = tensor_arg(dk),
          .dv = tensor_arg(dv),
          .lse = static_cast<float const*>(lse_packed.data_ptr()),
          .dlse = dlse_packed.has_value() ? static_cast<float const*>(dlse_packed->data_ptr()) : nullptr,
          .dq_accum = static_cast<float*>(dq_accum.data_ptr()),
          .lse_log2 = static_cast<float*>(lse_log2.data_ptr()),
          .dsum = static_cast<float*>(dsum.data_ptr()),
          .dq_turn = deterministic ? static_cast<int*>(dq_turn.data_ptr()) : nullptr,
          .batch = static_cast<int>(problem.batch),
          .seqlen_q = static_cast<int>(seqlen_q),
          .seqlen_k = static_cast<int>(problem.seqlen_k),
          .num_heads_q = static_cast<int>(problem.num_heads_q),
          .num_heads_kv = static_cast<int>(problem.num_heads_kv),
          .head_dim = static_cast<int>(problem.head_dim),
          .softmax_scale = static_cast<float>(softmax_scale),
          .causal = causal,
          .deterministic = deterministic,
          .num_sms = device_properties(problem.device).num_sms,
      },
      current_stream(problem.device));
  return {dq, dk, dv};
}

}  // namespace
}  // namespace fa3

STABLE_TORCH_LIBRARY(fa3, m) {
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, bool deterministic=False) "
      "-> (Tensor out, Tensor lse)");
  m.def(
      "fwd_fp8(Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
      "float softmax_scale, bool causal, bool out_fp16, bool v_transposed=False) -> (Tensor out, Tensor lse)");
  m.def(
      "bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
      "bool causal, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)");
}

STABLE_TORCH_LIBRARY_IMPL(fa3, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&fa3::fwd));
  m.impl("fwd_fp8", TORCH_BOX(&fa3::fwd_fp8));
  m.impl("bwd", TORCH_BOX(&fa3::bwd));
}
