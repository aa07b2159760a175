#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(kernel_row<cutlass::float_e4m3_t, HeadDims<256>, kE4m3Hdim256>("fwd_e4m3_hdim256"));
}
