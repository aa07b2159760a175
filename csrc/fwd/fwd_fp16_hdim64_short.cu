#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_kernel_row<cutlass::half_t, 64, fa3::kFwdHdim64Short>("fwd_fp16_hdim64_short"));
