#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_kernel_row<cutlass::half_t, 192, fa3::kFwdHdim192>("fwd_fp16_hdim192"));
