// What the table of built kernels (`python -m fa3`) says of a kernel, forward or backward. Plain host code.
#pragma once

namespace fa3 {

enum class Dtype : int { kFloat16 = 0, kBFloat16 = 1, kFloat8E4M3 = 2 };

struct KernelInfo {
  char const* name;  // of its source file
  int rank;          // of the kernels that serve a call it takes the one of the lowest rank
  Dtype dtype;
  int head_dim;    // the largest that it serves, of q and k
  int head_dim_v;  // of v and out
  int tile_m;      // query rows per CTA (forward) or per step (backward)
  int tile_n;      // keys per step (forward) or per CTA (backward)
  int stages;      // forward: of the K ring and of the V ring; backward: of the Q ring
  int consumer_warpgroups;
  int smem_bytes;
};

}  // namespace fa3
