// The backward kernels that are built, and which of them a call takes. Plain host code.
#pragma once

#include <cuda_runtime.h>

#include "common/kernel_table.h"
#include "params.h"

namespace fa3::bwd {

// What a call asks of a kernel.
struct Problem {
  Dtype dtype;
  int head_dim;
  int head_dim_v;
};

struct Kernel {
  KernelInfo info;
  // Preprocess, main kernel and postprocess, in order on the stream.
  void (*launch)(BwdParams const&, cudaStream_t);

  // Heads that are narrower than the kernel's are padded with zeros by TMA.
  bool serves(Problem const& problem) const {
    return problem.dtype == info.dtype && problem.head_dim <= info.head_dim && problem.head_dim_v <= info.head_dim_v;
  }
};

using Kernels = KernelTable<Kernel>;

}  // namespace fa3::bwd
