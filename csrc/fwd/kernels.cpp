#include "fwd/kernels.h"

#include <algorithm>
#include <tuple>

namespace fa3 {

namespace {

std::vector<FwdKernel>& registry() {
  static std::vector<FwdKernel> kernels;
  return kernels;
}

}  // namespace

FwdKernelRegistration::FwdKernelRegistration(FwdKernel const& kernel) {
  auto const before = [](FwdKernel const& a, FwdKernel const& b) {
    return std::tie(a.info.dtype, a.v_transposed, a.info.head_dim, a.info.tile_m, a.info.tile_n) <
           std::tie(b.info.dtype, b.v_transposed, b.info.head_dim, b.info.tile_m, b.info.tile_n);
  };
  auto& kernels = registry();
  kernels.insert(std::upper_bound(kernels.begin(), kernels.end(), kernel, before), kernel);
}

std::vector<FwdKernel> const& fwd_kernels() { return registry(); }

FwdKernel const* select_fwd_kernel(Dtype dtype, int head_dim, int seqlen_k, bool causal, bool v_transposed) {
  FwdKernel const* selected = nullptr;
  for (FwdKernel const& kernel : registry()) {
    if (kernel.info.dtype != dtype || kernel.v_transposed != v_transposed || kernel.info.head_dim < head_dim) {
      continue;
    }
    if (selected != nullptr && kernel.info.head_dim != selected->info.head_dim) {
      break;
    }
    selected = &kernel;
    if (seqlen_k <= (causal ? kernel.max_seqlen_k_causal : kernel.max_seqlen_k_full)) {
      break;
    }
  }
  return selected;
}

}  // namespace fa3
