#include "bwd/kernels.h"

#include <algorithm>
#include <tuple>

namespace fa3 {

namespace {

std::vector<BwdKernel>& registry() {
  static std::vector<BwdKernel> kernels;
  return kernels;
}

}  // namespace

BwdKernelRegistration::BwdKernelRegistration(BwdKernel const& kernel) {
  auto const before = [](BwdKernel const& a, BwdKernel const& b) {
    return std::tie(a.info.dtype, a.info.head_dim) < std::tie(b.info.dtype, b.info.head_dim);
  };
  auto& kernels = registry();
  kernels.insert(std::upper_bound(kernels.begin(), kernels.end(), kernel, before), kernel);
}

std::vector<BwdKernel> const& bwd_kernels() { return registry(); }

BwdKernel const* select_bwd_kernel(Dtype dtype, int head_dim) {
  for (BwdKernel const& kernel : registry()) {
    if (kernel.info.dtype == dtype && kernel.info.head_dim >= head_dim) {
      return &kernel;
    }
  }
  return nullptr;
}

}  // namespace fa3
