#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_kernel_row<cutlass::bfloat16_t, 256, fa3::kFwdHdim256Long>("fwd_bf16_hdim256_long"));
