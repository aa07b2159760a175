#include "bwd/launch.cuh"

namespace fa3::bwd {
static Kernels::Entry const entry(kernel_row<cutlass::half_t, HeadDims<192>, kHdim192>("bwd_fp16_hdim192"));
}
