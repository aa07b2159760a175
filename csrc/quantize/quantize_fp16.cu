#include "quantize/launch.cuh"

void fa3::quantize_fp16(QuantizeParams const& params, cudaStream_t stream) {
  launch_quantize_of_width<cutlass::half_t>(params, stream);
}
