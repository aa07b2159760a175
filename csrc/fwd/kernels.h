// The forward kernels that are built, and which of them a call takes. Plain host code.
#pragma once

#include <cuda_runtime.h>

#include "common/kernel_table.h"
#include "fwd/tiles.h"
#include "params.h"

namespace fa3::fwd {

// What a call asks of a kernel.
struct Problem {
  Dtype dtype;
  int head_dim;
  int head_dim_v;
  int seqlen_k;
  MaskParams mask;
  bool v_transposed;  // in global memory (FP8)
};

struct Kernel {
  KernelInfo info;
  VLayout v_layout;
  int max_seqlen_k_full;  // FwdTile
  int max_seqlen_k_causal;
  void (*launch)(FwdParams const&, cudaStream_t);

  // Heads that are narrower than the kernel's are padded with zeros by TMA.
  bool serves(Problem const& problem) const {
    // FP8 kernels know masks that are causal and none (CausalMask).
    MaskParams const& mask = problem.mask;
    bool const has_mask = info.dtype != Dtype::kFloat8E4M3 || mask.is_causal_or_none();
    int const max_seqlen_k = mask.limits_right() ? max_seqlen_k_causal : max_seqlen_k_full;
    return problem.dtype == info.dtype && problem.head_dim <= info.head_dim && problem.head_dim_v <= info.head_dim_v &&
           problem.v_transposed == (v_layout == VLayout::kTransposed) && has_mask &&
           mask.most_keys(problem.seqlen_k) <= max_seqlen_k;
  }
};

using Kernels = KernelTable<Kernel>;

}  // namespace fa3::fwd
