#include "fwd/launch.cuh"

namespace fa3::fwd {
static Kernels::Entry const entry(kernel_row<cutlass::float_e4m3_t, HeadDims<128>, kE4m3Hdim128>("fwd_e4m3_hdim128"));
}
