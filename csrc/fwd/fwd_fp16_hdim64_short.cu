#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(kernel_row<cutlass::half_t, HeadDims<64>, kHdim64Short>("fwd_fp16_hdim64_short"));
}
