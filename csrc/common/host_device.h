// Lets the integer logic compile for the GPU and, in the tests, with a plain host compiler.
#pragma once

#ifdef __CUDACC__
#define FA3_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FA3_HOST_DEVICE inline
#endif
