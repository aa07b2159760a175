#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_kernel_row<cutlass::bfloat16_t, 64, fa3::kFwdHdim64Long>("fwd_bf16_hdim64_long"));
