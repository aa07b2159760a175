#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(
    kernel_row<cutlass::bfloat16_t, HeadDims<256>, kHdim256Long>("fwd_bf16_hdim256_long"));
}
