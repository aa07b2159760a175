#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(kernel_row<cutlass::bfloat16_t, HeadDims<96>, kHdim96>("fwd_bf16_hdim96"));
}
