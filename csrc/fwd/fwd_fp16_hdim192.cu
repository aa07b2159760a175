#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(kernel_row<cutlass::half_t, HeadDims<192>, kHdim192>("fwd_fp16_hdim192"));
}
