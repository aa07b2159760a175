// What every op needs of torch: argument checks, device and stream. Only files of ops/ include torch's headers, and of
// those only the stable ABI's, so that one build serves every torch from 2.10 on.
#pragma once

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
#include <vector>

#include "check.h"
#include "common/kernel_info.h"
#include "params.h"

namespace fa3 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// --- Messages

inline std::string name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    default:
      return torch::headeronly::toString(type);
  }
}

inline std::string dtype_of(Tensor const& tensor) { return name_of(tensor.scalar_type()); }

inline std::string shape_text(std::vector<int64_t> const& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return text + ")";
}

inline std::vector<int64_t> sizes_of(Tensor const& tensor) {
  auto const sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

inline std::string shape_of(Tensor const& tensor) { return shape_text(sizes_of(tensor)); }

// --- Device and stream

struct DeviceProperties {
  int num_sms;
  int major;
  int minor;
};

// Asked once per device: cudaDeviceGetAttribute is cheap, but not free on every call.
inline DeviceProperties const& device_properties(int device) {
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

// Makes a device and its context current while it lives. To encode a tensor map for TMA, the driver needs a current
// context; unlike the runtime, the driver makes none current by itself. A thread of autograd's may have none yet.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) : guard_(device) { FA3_CHECK_CUDA(cudaSetDevice(device)); }

 private:
  torch::stable::accelerator::DeviceGuard const guard_;
};

inline cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// --- Tensors as the kernels take them

// TMA reads contiguous vectors from 16-byte aligned addresses, and strides below 2^40 bytes. The stride of a dimension
// of size 1 does not matter.
inline bool tma_addressable(Tensor const& tensor) {
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

// The tensor, or a copy of it if TMA cannot address it.
inline Tensor for_tma(Tensor const& tensor) {
  if (tma_addressable(tensor)) {
    return tensor;
  }
  Tensor copy = torch::stable::new_empty(tensor, tensor.sizes());
  torch::stable::copy_(copy, tensor);
  return copy;
}

inline TensorArg tensor_arg(Tensor const& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// --- Checks

// `first` is the argument whose device and dtype the others must share.
inline void check_tensor(ArgumentCheck const& check, char const* name, Tensor const& tensor, char const* first,
                         int device, ScalarType type) {
  check(tensor.is_cuda(), name, "be on a CUDA device", "a tensor elsewhere");
  check(tensor.get_device() == device, name, std::string("be on ") + first + "'s device " + std::to_string(device),
        "device " + std::to_string(tensor.get_device()));
  check(tensor.scalar_type() == type, name,
        type == ScalarType::Float ? "be float32" : std::string("have ") + first + "'s dtype " + name_of(type),
        dtype_of(tensor));
}

inline void check_shape(ArgumentCheck const& check, char const* name, Tensor const& tensor,
                        std::vector<int64_t> const& shape, std::string const& rule) {
  check(sizes_of(tensor) == shape, name, rule, shape_of(tensor));
}

// What q, k, v and the like have in common.
inline void check_input(ArgumentCheck const& check, char const* name, Tensor const& tensor) {
  check(tensor.dim() == 4, name, "have 4 dimensions (batch, seqlen, num_heads, head_dim)", shape_of(tensor));
  check(tensor.numel() == 0 || tensor.size(3) == 1 || tensor.stride(3) == 1, name, "have a contiguous last dimension",
        "stride " + std::to_string(tensor.stride(3)));
  for (int64_t i = 0; i < 4; ++i) {
    // 1024 short of the limit, so that a last tile's end still fits an int.
    check(tensor.size(i) <= std::numeric_limits<int>::max() - 1024, name, "have sizes below 2^31 - 1024",
          shape_of(tensor));
  }
}

inline Dtype check_16_bits(ArgumentCheck const& check, char const* name, Tensor const& tensor) {
  ScalarType const type = tensor.scalar_type();
  check(type == ScalarType::Half || type == ScalarType::BFloat16, name, "be float16 or bfloat16", name_of(type));
  return type == ScalarType::Half ? Dtype::kFloat16 : Dtype::kBFloat16;
}

inline void check_head_dim(ArgumentCheck const& check, char const* name, int64_t head_dim, int64_t least = 8) {
  std::string const unit = std::to_string(least);
  check(head_dim >= least && head_dim <= 256 && head_dim % least == 0, name,
        "have a head_dim that is a multiple of " + unit + " from " + unit + " to 256", std::to_string(head_dim));
}

inline void check_hopper(ArgumentCheck const& check, char const* name, int device) {
  DeviceProperties const& properties = device_properties(device);
  check(properties.major == 9 && properties.minor == 0, name, "be on a Hopper GPU (compute capability 9.0)",
        std::to_string(properties.major) + "." + std::to_string(properties.minor));
}

}  // namespace fa3
