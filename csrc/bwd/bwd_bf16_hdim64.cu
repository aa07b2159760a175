#include "bwd/launch.cuh"

static fa3::BwdKernelRegistration const registration(
    fa3::bwd_kernel_row<cutlass::bfloat16_t, 64, fa3::kBwdHdim64>("bwd_bf16_hdim64"));
