// The torch side: op schemas, every argument check, output allocation, device and stream. The only file with torch
// headers, and only those of the stable ABI, so that one build serves every torch from 2.10 on.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <limits>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "fwd/kernels.h"

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

// fwd: <argument> must <rule>, got <value>
void check_argument(bool condition, char const* argument, std::string const& rule, std::string const& got) {
  FA3_CHECK(condition, std::string("fwd: ") + argument + " must " + rule + ", got " + got);
}

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

// TMA reads 16-byte aligned rows: a tensor whose base or whose stride of a dimension longer than 1 is not a multiple of
// 16 bytes is copied. (Strides of 2^40 bytes and more are not addressable either.)
bool tma_addressable(Tensor const& tensor) {
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0) {
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

fa3::TensorArg tensor_arg(Tensor const& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

std::tuple<Tensor, Tensor> fwd(Tensor const& q, Tensor const& k, Tensor const& v, double softmax_scale, bool causal) {
  auto const check_tensor = [&](char const* name, Tensor const& tensor) {
    check_argument(tensor.is_cuda(), name, "be on a CUDA device", "a tensor elsewhere");
    check_argument(tensor.get_device() == q.get_device(), name, "be on q's device " + std::to_string(q.get_device()),
                   "device " + std::to_string(tensor.get_device()));
    check_argument(tensor.scalar_type() == ScalarType::Half || tensor.scalar_type() == ScalarType::BFloat16, name,
                   "be float16 or bfloat16", "scalar type " + std::to_string(static_cast<int>(tensor.scalar_type())));
    check_argument(tensor.scalar_type() == q.scalar_type(), name, "have q's dtype", "another one");
    check_argument(tensor.dim() == 4, name, "have 4 dimensions (batch, seqlen, num_heads, head_dim)", shape_of(tensor));
    check_argument(tensor.numel() == 0 || tensor.size(3) == 1 || tensor.stride(3) == 1, name,
                   "have a contiguous last dimension", "stride " + std::to_string(tensor.stride(3)));
    for (int64_t i = 0; i < 4; ++i) {
      // 1024 short of the limit, so that a last tile's end still fits an int.
      check_argument(tensor.size(i) <= std::numeric_limits<int>::max() - 1024, name, "have sizes below 2^31 - 1024",
                     shape_of(tensor));
    }
  };
  check_tensor("q", q);
  check_tensor("k", k);
  check_tensor("v", v);

  int64_t const batch = q.size(0), seqlen_q = q.size(1), num_heads_q = q.size(2), head_dim = q.size(3);
  int64_t const seqlen_k = k.size(1), num_heads_kv = k.size(2);
  check_argument(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0, "q",
                 "have a head_dim that is a multiple of 8 from 8 to 256", std::to_string(head_dim));
  check_argument(k.size(0) == batch && k.size(3) == head_dim, "k", "have q's batch and head_dim", shape_of(k));
  check_argument(v.size(0) == batch && v.size(1) == seqlen_k && v.size(2) == num_heads_kv && v.size(3) == head_dim, "v",
                 "have k's shape " + shape_of(k), shape_of(v));
  check_argument(num_heads_q >= 1 && num_heads_kv >= 1 && num_heads_q % num_heads_kv == 0, "q",
                 "have a multiple of k's " + std::to_string(num_heads_kv) + " heads", std::to_string(num_heads_q));
  check_argument(softmax_scale >= 1e-37 && softmax_scale <= 1e38, "softmax_scale", "be from 1e-37 to 1e38 (float32)",
                 std::to_string(softmax_scale));

  int const device = q.get_device();
  torch::stable::accelerator::DeviceGuard const guard(device);
  DeviceProperties const& properties = device_properties(device);
  check_argument(properties.major == 9 && properties.minor == 0, "q", "be on a Hopper GPU (compute capability 9.0)",
                 std::to_string(properties.major) + "." + std::to_string(properties.minor));

  Dtype const dtype = q.scalar_type() == ScalarType::Half ? Dtype::kFloat16 : Dtype::kBFloat16;
  fa3::FwdKernel const* kernel = fa3::select_fwd_kernel(dtype, head_dim, seqlen_k, causal);
  FA3_CHECK(kernel != nullptr,
            "fwd: this build has no kernel for head_dim " + std::to_string(head_dim) + " of q's dtype");

  Tensor out = torch::stable::new_empty(q, {batch, seqlen_q, num_heads_q, head_dim});
  Tensor lse = torch::stable::new_empty(q, {batch, num_heads_q, seqlen_q}, ScalarType::Float);
  if (out.numel() == 0) {
    return {out, lse};
  }
  if (seqlen_k == 0) {  // no row has a key
    torch::stable::fill_(out, 0);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
    return {out, lse};
  }

  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  Tensor const q_tma = for_tma(q), k_tma = for_tma(k), v_tma = for_tma(v);
  kernel->launch(
      {
          .q = tensor_arg(q_tma),
          .k = tensor_arg(k_tma),
          .v = tensor_arg(v_tma),
          .out = tensor_arg(out),
          .lse = static_cast<float*>(lse.data_ptr()),
          .batch = static_cast<int>(batch),
          .seqlen_q = static_cast<int>(seqlen_q),
          .seqlen_k = static_cast<int>(seqlen_k),
          .num_heads_q = static_cast<int>(num_heads_q),
          .num_heads_kv = static_cast<int>(num_heads_kv),
          .head_dim = static_cast<int>(head_dim),
          .softmax_scale = static_cast<float>(softmax_scale),
          .causal = causal,
          .num_sms = properties.num_sms,
      },
      static_cast<cudaStream_t>(stream));
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY(fa3, m) {
  m.def("fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(fa3, CUDA, m) { m.impl("fwd", TORCH_BOX(&fwd)); }

// For `python -m fa3` and `fa3.explain`, through ctypes: they must work without a GPU.
#define FA3_EXPORT extern "C" __attribute__((visibility("default")))

// The built kernels as a JSON list.
FA3_EXPORT char const* fa3_kernel_table() {
  static std::string const table = [] {
    std::string json = "[";
    for (fa3::FwdKernel const& kernel : fa3::fwd_kernels()) {
      auto const text = [](char const* name, char const* value) {
        return std::string("\"") + name + "\": \"" + value + "\"";
      };
      auto const number = [](char const* name, int value) {
        return std::string(", \"") + name + "\": " + std::to_string(value);
      };
      json += std::string(json.size() > 1 ? ", {" : "{") + text("name", kernel.name) + ", " + text("pass", "fwd") +
              ", " + text("dtype", kernel.dtype == Dtype::kBFloat16 ? "bf16" : "fp16") +
              number("head_dim", kernel.head_dim) + number("tile_m", kernel.tile_m) + number("tile_n", kernel.tile_n) +
              number("stages", kernel.stages) + number("consumer_warpgroups", kernel.consumer_warpgroups) +
              number("smem_bytes", kernel.smem_bytes) + "}";
    }
    return json + "]";
  }();
  return table.c_str();
}

// Row of fa3_kernel_table that a forward call takes, or -1. `dtype`: 0 float16, 1 bfloat16.
FA3_EXPORT int fa3_select_fwd_kernel(int dtype, int head_dim, int seqlen_k, bool causal) {
  fa3::FwdKernel const* selected = fa3::select_fwd_kernel(static_cast<Dtype>(dtype), head_dim, seqlen_k, causal);
  return selected == nullptr ? -1 : static_cast<int>(selected - fa3::fwd_kernels().data());
}
