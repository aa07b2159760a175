#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_kernel_row<cutlass::bfloat16_t, 96, fa3::kFwdHdim96>("fwd_bf16_hdim96"));
