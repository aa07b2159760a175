#include "quantize/launch.cuh"

void fa3::quantize::quantize_bf16(QuantizeParams const& params, cudaStream_t stream) {
  launch_by_width<cutlass::bfloat16_t>(params, stream);
}
