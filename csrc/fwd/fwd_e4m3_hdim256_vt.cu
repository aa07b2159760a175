#include "fwd/launch.cuh"

static fa3::FwdKernelRegistration const registration(
    fa3::fwd_fp8_kernel_row<256, fa3::kFwdFp8Hdim256Vt>("fwd_e4m3_hdim256_vt"));
