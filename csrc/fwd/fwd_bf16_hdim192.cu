#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(kernel_row<cutlass::bfloat16_t, HeadDims<192>, kHdim192>("fwd_bf16_hdim192"));
}
