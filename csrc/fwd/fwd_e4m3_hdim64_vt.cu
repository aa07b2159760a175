#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_fp8_kernel_row<64, fa3::kFwdFp8Hdim64Vt>("fwd_e4m3_hdim64_vt"));
