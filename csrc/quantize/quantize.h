// The quantizer to e4m3, as the op calls it. Plain host code.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace fa3::quantize {

// Launch on the stream, for x of bfloat16 and of float16.
void quantize_bf16(QuantizeParams const& params, cudaStream_t stream);
void quantize_fp16(QuantizeParams const& params, cudaStream_t stream);

}  // namespace fa3::quantize
