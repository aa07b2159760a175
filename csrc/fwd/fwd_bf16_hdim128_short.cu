#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_kernel_row<cutlass::bfloat16_t, 128, fa3::kFwdHdim128Short>("fwd_bf16_hdim128_short"));
