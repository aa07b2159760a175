// The backward kernels that are built, and which of them a call takes. Plain host code.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "common/kernel_info.h"
#include "params.h"

namespace fa3 {

struct BwdKernel {
  KernelInfo info;
  // Preprocess, main kernel and postprocess, in order on the stream.
  void (*launch)(BwdParams const&, cudaStream_t);
};

// All kernels of this build, by dtype and head_dim.
std::vector<BwdKernel> const& bwd_kernels();

// The kernel that a call takes, or nullptr when none was built for its dtype and head_dim.
BwdKernel const* select_bwd_kernel(Dtype dtype, int head_dim);

// Each kernel's source file has one of these, so that a build may leave files out.
struct BwdKernelRegistration {
  explicit BwdKernelRegistration(BwdKernel const& kernel);
};

}  // namespace fa3
