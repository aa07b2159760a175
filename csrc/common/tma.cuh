// TMA: tensor maps (host) and the loads and stores of one tile (device).
//
// A tile is brought as slabs of 128 bytes of columns (the span of the widest swizzle), 64 of 16 bits or 128 of FP8,
// each [rows][columns]; where head_dim is not a multiple of that, of half as many:
//
//   global (seqlen, head_dim)      shared
//   +----------+----------+        slab 0  rows x 128 bytes   columns  0..63
//   | slab 0   | slab 1   |   ->   slab 1  rows x 128 bytes   columns 64..127
//   +----------+----------+
//
// which is CuTe's tile_to_shape(Layout_K_SW128_Atom, (rows, head_dim)). Rows past the sequence and columns past the
// caller's head_dim arrive as zeros, and are left alone by a store.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

#include "check.h"
#include "params.h"

namespace fa3 {

constexpr int slab_columns(int head_dim, int element_bytes = 2) {
  int const widest = 128 / element_bytes;
  return head_dim % widest == 0 ? widest : widest / 2;
}

template <class Element>
constexpr CUtensorMapDataType tensor_map_type() {
  return sizeof(Element) == 1                       ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : sizeof(Element) == 4                     ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// The driver's encoder, found at run time so that nothing links libcuda.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static auto const encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    FA3_CHECK_CUDA(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    FA3_CHECK(found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled; update it to CUDA 12");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

// A map over (head_dim, seqlen, num_heads, batch) whose box is one slab of `box_rows` rows.
template <class Element, int kSlabColumns>
CUtensorMap make_tensor_map(TensorArg const& tensor, int head_dim, int seqlen, int num_heads, int batch, int box_rows) {
  // The stride of a dimension of size 1 is never used, and the caller's may be one that TMA refuses.
  auto const stride_bytes = [](int size, int64_t stride) {
    return size == 1 ? uint64_t{16} : static_cast<uint64_t>(stride) * sizeof(Element);
  };
  cuuint64_t const sizes[4] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(seqlen),
                               static_cast<cuuint64_t>(num_heads), static_cast<cuuint64_t>(batch)};
  cuuint64_t const strides[3] = {stride_bytes(seqlen, tensor.row_stride), stride_bytes(num_heads, tensor.head_stride),
                                 stride_bytes(batch, tensor.batch_stride)};
  cuuint32_t const box[4] = {kSlabColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  cuuint32_t const element_strides[4] = {1, 1, 1, 1};
  constexpr int kSlabBytes = kSlabColumns * sizeof(Element);
  CUtensorMapSwizzle const swizzle = kSlabBytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : kSlabBytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                        : CU_TENSOR_MAP_SWIZZLE_32B;
  CUtensorMap map;
  CUresult const result = tensor_map_encoder()(&map, tensor_map_type<Element>(), 4, tensor.data, sizes, strides, box,
                                               element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FA3_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result));
  return map;
}

// Loads rows [row, row + kRows) of one head into `smem`, completing on `barrier`.
template <int kRows, int kHeadDim, int kSlabColumns, class Element>
CUTLASS_DEVICE void load_tile(CUtensorMap const& map, uint64_t* barrier, cute::TMA::CacheHintSm90 cache_hint,
                              Element* smem, int row, int head_idx, int batch_idx) {
  CUTLASS_PRAGMA_UNROLL
  for (int column = 0; column < kHeadDim; column += kSlabColumns) {
    cute::SM90_TMA_LOAD_4D::copy(&map, barrier, static_cast<uint64_t>(cache_hint), smem + column * kRows, column, row,
                                 head_idx, batch_idx);
  }
}

// Of a V that is transposed in global memory, (head_dim, keys): all channels of keys [key, key + kKeys), one slab.
template <int kKeys, class Element>
CUTLASS_DEVICE void load_keys(CUtensorMap const& map, uint64_t* barrier, cute::TMA::CacheHintSm90 cache_hint,
                              Element* smem, int key, int head_idx, int batch_idx) {
  static_assert(kKeys * sizeof(Element) == 128);
  cute::SM90_TMA_LOAD_4D::copy(&map, barrier, static_cast<uint64_t>(cache_hint), smem, key, 0, head_idx, batch_idx);
}

// Adds `bytes` of floats in shared memory to global memory, 16-byte aligned, as part of the current bulk group.
CUTLASS_DEVICE void reduce_add(float* global, float const* smem, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(global), "r"(cute::cast_smem_ptr_to_uint(smem)), "r"(bytes)
               : "memory");
}

// Waits until the bulk groups of this thread have been written, not only read from shared memory.
CUTLASS_DEVICE void wait_bulk_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders ordinary accesses of global memory with those of TMA.
CUTLASS_DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace fa3
