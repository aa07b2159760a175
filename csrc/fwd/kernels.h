// The forward kernels that are built, and which of them a call takes. Plain host code.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "common/kernel_info.h"
#include "params.h"

namespace fa3 {

struct FwdKernel {
  KernelInfo info;
  bool v_transposed;      // in global memory (FP8 only)
  int max_seqlen_k_full;  // the longest seqlen_k that it is meant for
  int max_seqlen_k_causal;
  void (*launch)(FwdParams const&, cudaStream_t);
};

// All kernels of this build, by dtype, head_dim and size of the tile.
std::vector<FwdKernel> const& fwd_kernels();

// The kernel that a call takes, or nullptr when none was built for its dtype, head_dim and layout of V.
FwdKernel const* select_fwd_kernel(Dtype dtype, int head_dim, int seqlen_k, bool causal, bool v_transposed);

// Each kernel's source file has one of these, so that a build may leave files out.
struct FwdKernelRegistration {
  explicit FwdKernelRegistration(FwdKernel const& kernel);
};

}  // namespace fa3
