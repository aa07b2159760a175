#pragma once

namespace fa3 {

// Columns of q and k, and of v and out, that a kernel is compiled for.
template <int kHeadDim_, int kHeadDimV_ = kHeadDim_>
struct HeadDims {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
};

}  // namespace fa3
