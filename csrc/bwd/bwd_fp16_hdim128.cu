#include "bwd/launch.cuh"

namespace fa3::bwd {
static Kernels::Entry const entry(kernel_row<cutlass::half_t, HeadDims<128>, kHdim128>("bwd_fp16_hdim128"));
}
