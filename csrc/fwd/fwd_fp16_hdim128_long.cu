#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(kernel_row<cutlass::half_t, HeadDims<128>, kHdim128Long>("fwd_fp16_hdim128_long"));
}
