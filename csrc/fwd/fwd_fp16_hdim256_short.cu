#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(kernel_row<cutlass::half_t, HeadDims<256>, kHdim256Short>("fwd_fp16_hdim256_short"));
}
