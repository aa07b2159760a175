// The torch side: op schemas, every argument check, output allocation, device and stream. The only file with torch
// headers, and only those of the stable ABI, so that one build serves every torch from 2.10 on.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bwd/kernels.h"
#include "check.h"
#include "fwd/kernels.h"
#include "fwd/tiles.h"

namespace {

using fa3::Dtype;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string shape_of(Tensor const& tensor) {
  std::string text = "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + ")";
}

// The checks of one op, each of which throws `<op>: <argument> must <rule>, got <value>`.
struct ArgumentCheck {
  char const* op;

  void operator()(bool condition, char const* argument, std::string const& rule, std::string const& got) const {
    FA3_CHECK(condition, std::string(op) + ": " + argument + " must " + rule + ", got " + got);
  }
};

struct DeviceProperties {
  int num_sms;
  int major;
  int minor;
};

// Asked once per device: cudaDeviceGetAttribute is cheap, but not free on every call.
DeviceProperties const& device_properties(int device) {
  static std::mutex mutex;
  static std::vector<DeviceProperties> cache;
  std::lock_guard const lock(mutex);
  if (static_cast<size_t>(device) >= cache.size()) {
    int count = 0;
    FA3_CHECK_CUDA(cudaGetDeviceCount(&count));
    std::vector<DeviceProperties> all(count);
    for (int i = 0; i < count; ++i) {
      FA3_CHECK_CUDA(cudaDeviceGetAttribute(&all[i].num_sms, cudaDevAttrMultiProcessorCount, i));
      FA3_CHECK_CUDA(cudaDeviceGetAttribute(&all[i].major, cudaDevAttrComputeCapabilityMajor, i));
      FA3_CHECK_CUDA(cudaDeviceGetAttribute(&all[i].minor, cudaDevAttrComputeCapabilityMinor, i));
    }
    cache = std::move(all);
  }
  return cache[device];
}

// TMA reads contiguous vectors from 16-byte aligned addresses: a tensor whose base, or whose stride of a dimension
// longer than 1, does not fit is copied. (Strides of 2^40 bytes and more are not addressable either.)
bool tma_addressable(Tensor const& tensor) {
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0 || tensor.stride(3) != 1) {
    return false;
  }
  for (int64_t i = 0; i < 3; ++i) {
    int64_t const stride_bytes = tensor.stride(i) * static_cast<int64_t>(tensor.element_size());
    if (tensor.size(i) > 1 && (stride_bytes % 16 != 0 || stride_bytes < 0 || stride_bytes >= (int64_t{1} << 40))) {
      return false;
    }
  }
  return true;
}

Tensor for_tma(Tensor const& tensor) {
  if (tma_addressable(tensor)) {
    return tensor;
  }
  Tensor copy = torch::stable::new_empty(tensor, tensor.sizes());
  torch::stable::copy_(copy, tensor);
  return copy;
}

// Makes a device current while it lives, and its context too: TMA's tensor maps ask the driver, which, unlike the
// runtime, makes none current by itself. A thread of autograd's may have none yet.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) : guard_(device) { FA3_CHECK_CUDA(cudaSetDevice(device)); }

 private:
  torch::stable::accelerator::DeviceGuard const guard_;
};

fa3::TensorArg tensor_arg(Tensor const& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// What q, k and v say of a call.
struct Problem {
  int64_t batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim;
  Dtype dtype;
  int device;
};

void check_tensor(ArgumentCheck const& check, char const* name, Tensor const& tensor, int device, ScalarType type) {
  check(tensor.is_cuda(), name, "be on a CUDA device", "a tensor elsewhere");
  check(tensor.get_device() == device, name, "be on q's device " + std::to_string(device),
        "device " + std::to_string(tensor.get_device()));
  check(tensor.scalar_type() == type, name, type == ScalarType::Float ? "be float32" : "have q's dtype",
        "scalar type " + std::to_string(static_cast<int>(tensor.scalar_type())));
}

void check_shape(ArgumentCheck const& check, char const* name, Tensor const& tensor, std::vector<int64_t> const& shape,
                 std::string const& rule) {
  bool equal = tensor.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; equal && i < shape.size(); ++i) {
    equal = tensor.size(i) == shape[i];
  }
  check(equal, name, rule, shape_of(tensor));
}

Problem check_inputs(ArgumentCheck const& check, Tensor const& q, Tensor const& k, Tensor const& v,
                     double softmax_scale, bool fp8 = false) {
  ScalarType const type = q.scalar_type();
  check(fp8 ? type == ScalarType::Float8_e4m3fn : type == ScalarType::Half || type == ScalarType::BFloat16, "q",
        fp8 ? "be float8_e4m3fn" : "be float16 or bfloat16", "scalar type " + std::to_string(static_cast<int>(type)));
  auto const check_input = [&](char const* name, Tensor const& tensor) {
    check_tensor(check, name, tensor, q.get_device(), type);
    check(tensor.dim() == 4, name, "have 4 dimensions (batch, seqlen, num_heads, head_dim)", shape_of(tensor));
    check(tensor.numel() == 0 || tensor.size(3) == 1 || tensor.stride(3) == 1, name, "have a contiguous last dimension",
          "stride " + std::to_string(tensor.stride(3)));
    for (int64_t i = 0; i < 4; ++i) {
      // 1024 short of the limit, so that a last tile's end still fits an int.
      check(tensor.size(i) <= std::numeric_limits<int>::max() - 1024, name, "have sizes below 2^31 - 1024",
            shape_of(tensor));
    }
  };
  check_input("q", q);
  check_input("k", k);
  check_input("v", v);

  Problem const problem{
      .batch = q.size(0),
      .seqlen_q = q.size(1),
      .seqlen_k = k.size(1),
      .num_heads_q = q.size(2),
      .num_heads_kv = k.size(2),
      .head_dim = q.size(3),
      .dtype = fp8                        ? Dtype::kFloat8E4M3
               : type == ScalarType::Half ? Dtype::kFloat16
                                          : Dtype::kBFloat16,
      .device = q.get_device(),
  };
  int64_t const least = fp8 ? 16 : 8;  // 16 bytes, for TMA
  check(problem.head_dim >= least && problem.head_dim <= 256 && problem.head_dim % least == 0, "q",
        "have a head_dim that is a multiple of " + std::to_string(least) + " up to 256",
        std::to_string(problem.head_dim));
  check(k.size(0) == problem.batch && k.size(3) == problem.head_dim, "k", "have q's batch and head_dim", shape_of(k));
  check_shape(check, "v", v, {problem.batch, problem.seqlen_k, problem.num_heads_kv, problem.head_dim},
              "have k's shape " + shape_of(k));
  check(problem.num_heads_q >= 1 && problem.num_heads_kv >= 1 && problem.num_heads_q % problem.num_heads_kv == 0, "q",
        "have a multiple of k's " + std::to_string(problem.num_heads_kv) + " heads",
        std::to_string(problem.num_heads_q));
  check(softmax_scale >= 1e-37 && softmax_scale <= 1e38, "softmax_scale", "be from 1e-37 to 1e38 (float32)",
        std::to_string(softmax_scale));

  DeviceProperties const& properties = device_properties(problem.device);
  check(properties.major == 9 && properties.minor == 0, "q", "be on a Hopper GPU (compute capability 9.0)",
        std::to_string(properties.major) + "." + std::to_string(properties.minor));
  return problem;
}

template <class Kernel>
void check_built(char const* op, Kernel const* kernel, Problem const& problem) {
  FA3_CHECK(kernel != nullptr, std::string(op) + ": this build has no kernel for head_dim " +
                                   std::to_string(problem.head_dim) + " of q's dtype");
}

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// out and lse, written: by the kernel, or here where there is nothing to compute.
std::tuple<Tensor, Tensor> run_forward(char const* op, Problem const& problem, Tensor const& q, Tensor const& k,
                                       Tensor const& v, ScalarType out_type, double softmax_scale, bool causal,
                                       fa3::FwdParams params) {
  fa3::FwdKernel const* kernel = fa3::select_fwd_kernel(problem.dtype, problem.head_dim, problem.seqlen_k, causal);
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
  params.v = tensor_arg(v_tma);
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
fa3::BlockScales block_scales(ArgumentCheck const& check, char const* name, Tensor const& scales, int device,
                              int64_t batch, int64_t num_heads, int64_t seqlen) {
  check_tensor(check, name, scales, device, ScalarType::Float);
  int64_t const num_blocks = (seqlen + fa3::kFp8BlockRows - 1) / fa3::kFp8BlockRows;
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
                                   bool out_fp16) {
  ArgumentCheck const check{"fwd_fp8"};
  Problem const problem = check_inputs(check, q, k, v, softmax_scale, /*fp8=*/true);
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
                     });
}

// dout and out may have any strides; a dlse that is absent is zero.
std::tuple<Tensor, Tensor, Tensor> bwd(Tensor const& dout, std::optional<Tensor> const& dlse, Tensor const& q,
                                       Tensor const& k, Tensor const& v, Tensor const& out, Tensor const& lse,
                                       double softmax_scale, bool causal, bool deterministic) {
  ArgumentCheck const check{"bwd"};
  Problem const problem = check_inputs(check, q, k, v, softmax_scale);
  auto const check_like_q = [&](char const* name, Tensor const& tensor) {
    check_tensor(check, name, tensor, problem.device, q.scalar_type());
    check_shape(check, name, tensor, {problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim},
                "have q's shape " + shape_of(q));
  };
  auto const check_like_lse = [&](char const* name, Tensor const& tensor) {
    check_tensor(check, name, tensor, problem.device, ScalarType::Float);
    check_shape(check, name, tensor, {problem.batch, problem.num_heads_q, problem.seqlen_q},
                "have the shape (batch, num_heads_q, seqlen_q) of q " + shape_of(q));
  };
  check_like_q("dout", dout);
  check_like_q("out", out);
  check_like_lse("lse", lse);
  if (dlse.has_value()) {
    check_like_lse("dlse", *dlse);
  }
  fa3::BwdKernel const* kernel = fa3::select_bwd_kernel(problem.dtype, problem.head_dim);
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

STABLE_TORCH_LIBRARY(fa3, m) {
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, bool deterministic=False) "
      "-> (Tensor out, Tensor lse)");
  m.def(
      "fwd_fp8(Tensor q, Tensor k, Tensor v, Tensor q_descale, Tensor k_descale, Tensor v_descale, "
      "float softmax_scale, bool causal, bool out_fp16) -> (Tensor out, Tensor lse)");
  m.def(
      "bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
      "bool causal, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)");
}

STABLE_TORCH_LIBRARY_IMPL(fa3, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&fwd));
  m.impl("fwd_fp8", TORCH_BOX(&fwd_fp8));
  m.impl("bwd", TORCH_BOX(&bwd));
}

// For `python -m fa3` and `fa3.explain`, through ctypes: they must work without a GPU.
#define FA3_EXPORT extern "C" __attribute__((visibility("default")))

static char const* dtype_name(Dtype dtype) {
  return dtype == Dtype::kFloat8E4M3 ? "e4m3" : dtype == Dtype::kBFloat16 ? "bf16" : "fp16";
}

// The built kernels as a JSON list: those of the forward, then those of the backward.
FA3_EXPORT char const* fa3_kernel_table() {
  static std::string const table = [] {
    std::string json = "[";
    auto const add = [&](char const* pass, fa3::KernelInfo const& info) {
      auto const text = [](char const* name, char const* value) {
        return std::string("\"") + name + "\": \"" + value + "\"";
      };
      auto const number = [](char const* name, int value) {
        return std::string(", \"") + name + "\": " + std::to_string(value);
      };
      json += std::string(json.size() > 1 ? ", {" : "{") + text("name", info.name) + ", " + text("pass", pass) + ", " +
              text("dtype", dtype_name(info.dtype)) + number("head_dim", info.head_dim) +
              number("tile_m", info.tile_m) + number("tile_n", info.tile_n) + number("stages", info.stages) +
              number("consumer_warpgroups", info.consumer_warpgroups) + number("smem_bytes", info.smem_bytes) + "}";
    };
    for (fa3::FwdKernel const& kernel : fa3::fwd_kernels()) {
      add("fwd", kernel.info);
    }
    for (fa3::BwdKernel const& kernel : fa3::bwd_kernels()) {
      add("bwd", kernel.info);
    }
    return json + "]";
  }();
  return table.c_str();
}

// Row of fa3_kernel_table that a forward call takes, or -1. `dtype`: 0 float16, 1 bfloat16, 2 float8_e4m3fn.
FA3_EXPORT int fa3_select_fwd_kernel(int dtype, int head_dim, int seqlen_k, bool causal) {
  fa3::FwdKernel const* selected = fa3::select_fwd_kernel(static_cast<Dtype>(dtype), head_dim, seqlen_k, causal);
  return selected == nullptr ? -1 : static_cast<int>(selected - fa3::fwd_kernels().data());
}

// The same for a backward call.
FA3_EXPORT int fa3_select_bwd_kernel(int dtype, int head_dim) {
  fa3::BwdKernel const* selected = fa3::select_bwd_kernel(static_cast<Dtype>(dtype), head_dim);
  return selected == nullptr ? -1
                             : static_cast<int>(fa3::fwd_kernels().size() + (selected - fa3::bwd_kernels().data()));
}
