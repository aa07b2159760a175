#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_kernel_row<cutlass::half_t, 256, fa3::kFwdHdim256Short>("fwd_fp16_hdim256_short"));
