#include "quantize/launch.cuh"

void fa3::quantize::quantize_fp16(QuantizeParams const& params, cudaStream_t stream) {
  launch_by_width<cutlass::half_t>(params, stream);
}
