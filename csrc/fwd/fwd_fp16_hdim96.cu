#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_kernel_row<cutlass::half_t, 96, fa3::kFwdHdim96>("fwd_fp16_hdim96"));
