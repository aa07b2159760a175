#include "bwd/launch.cuh"

namespace fa3::bwd {
static Kernels::Entry const entry(kernel_row<cutlass::bfloat16_t, HeadDims<256>, kHdim256>("bwd_bf16_hdim256"));
}
