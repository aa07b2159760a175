// The forward kernels that are built, and which of them a call takes. Plain host code.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "params.h"

namespace fa3 {

enum class Dtype : int { kFloat16 = 0, kBFloat16 = 1 };

struct FwdKernel {
  char const* name;  // of its source file
  Dtype dtype;
  int head_dim;  // serves every head_dim down to the next smaller one that is built
  int tile_m;    // query rows per CTA
  int tile_n;    // keys per block
  int stages;    // of the K ring and of the V ring
  int consumer_warpgroups;
  int smem_bytes;
  int max_seqlen_k_full;  // the longest seqlen_k that it is meant for
  int max_seqlen_k_causal;
  void (*launch)(FwdParams const&, cudaStream_t);
};

// All kernels of this build, by dtype, head_dim and size of the tile.
std::vector<FwdKernel> const& fwd_kernels();

// The kernel that a call takes, or nullptr when none was built for its dtype and head_dim.
FwdKernel const* select_fwd_kernel(Dtype dtype, int head_dim, int seqlen_k, bool causal);

// Each kernel's source file has one of these, so that a build may leave files out.
struct FwdKernelRegistration {
  explicit FwdKernelRegistration(FwdKernel const& kernel);
};

}  // namespace fa3
