#include "bwd/launch.cuh"

static fa3::BwdKernelRegistration const registration(
    fa3::bwd_kernel_row<cutlass::half_t, 96, fa3::kBwdHdim96>("bwd_fp16_hdim96"));
