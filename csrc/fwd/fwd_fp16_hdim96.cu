#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(kernel_row<cutlass::half_t, HeadDims<96>, kHdim96>("fwd_fp16_hdim96"));
}
