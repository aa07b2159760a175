#include "bwd/launch.cuh"

namespace fa3::bwd {
static Kernels::Entry const entry(kernel_row<cutlass::bfloat16_t, HeadDims<64>, kHdim64>("bwd_bf16_hdim64"));
}
