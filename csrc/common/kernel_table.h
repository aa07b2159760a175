// The kernels of one pass that are built, and which of them a call takes. Plain host code.
#pragma once

#include <algorithm>
#include <vector>

#include "common/kernel_info.h"

namespace fa3 {

// Kernel has `KernelInfo info` and `bool serves(Problem const&)`. Each kernel's source file adds it by a static Entry,
// so that a build may leave files out.
template <class Kernel>
class KernelTable {
 public:
  struct Entry {
    explicit Entry(Kernel const& kernel) {
      auto const before = [](Kernel const& a, Kernel const& b) { return a.info.rank < b.info.rank; };
      auto& table = mutable_rows();
      table.insert(std::upper_bound(table.begin(), table.end(), kernel, before), kernel);
    }
  };

  // By rank.
  static std::vector<Kernel> const& rows() { return mutable_rows(); }

  // The first row that serves the problem, or nullptr.
  template <class Problem>
  static Kernel const* select(Problem const& problem) {
    auto const& table = rows();
    auto const found = std::find_if(table.begin(), table.end(), [&](Kernel const& k) { return k.serves(problem); });
    return found == table.end() ? nullptr : &*found;
  }

 private:
  static std::vector<Kernel>& mutable_rows() {
    static std::vector<Kernel> rows;
    return rows;
  }
};

}  // namespace fa3
