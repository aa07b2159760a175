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
//
// Every map has the dimensions (column, head, row, wrap, outer). What the last two are, and where row r of a sequence
// is, depends on the call; TmaRows (common/seqlen_info.h) holds what a kernel needs to know of it:
//
//            row                  wrap                    outer                              size of row
//   dense    r                    0, of size 1            sequence of the batch              seqlen
//   packed   2^30 - length + r    2^30: see packed_rows   row behind the sequence's last     2^30
//
// A row past the end of its sequence is thus out of bounds in both, also where another sequence follows in memory.
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

// How a map finds rows: its last three dimensions, with strides in bytes.
struct RowDimensions {
  uint64_t rows;
  uint64_t row_stride;
  uint64_t wrap;
  uint64_t wrap_stride;
  uint64_t outer;
  uint64_t outer_stride;
};

// Dense: `outer` is the sequence of the batch.
template <class Element>
RowDimensions dense_rows(TensorArg const& tensor, int seqlen, int batch) {
  return {static_cast<uint64_t>(seqlen), tensor.row_stride * sizeof(Element),  1, 0,
          static_cast<uint64_t>(batch),  tensor.batch_stride * sizeof(Element)};
}

// Packed: the sequences of a batch lie one after the other, `total` rows in all. `outer` is the row behind a sequence's
// last; coordinate kPackedRows of `wrap` takes back the kPackedRows rows that row_origin is short of it, since
// 2^30 (2^34 - row_stride) = -2^30 row_stride modulo 2^64.
template <class Element>
RowDimensions packed_rows(TensorArg const& tensor, int64_t total) {
  uint64_t const row_stride = tensor.row_stride * sizeof(Element);
  return {kPackedRows,         row_stride, (uint64_t{1} << 31) - 1, (uint64_t{1} << 34) - row_stride,
          uint64_t(total) + 1, row_stride};
}

// A map whose box is one slab of `box_rows` rows of a head.
template <class Element, int kSlabColumns>
CUtensorMap make_tensor_map(TensorArg const& tensor, int num_columns, int num_heads, RowDimensions const& rows,
                            int box_rows) {
  // The stride of a dimension of size 1 is never used, and the caller's may be one that TMA refuses.
  auto const stride = [](uint64_t size, uint64_t stride_bytes) { return size == 1 ? uint64_t{16} : stride_bytes; };
  uint64_t const num_heads_u64 = num_heads;
  cuuint64_t const sizes[5] = {static_cast<cuuint64_t>(num_columns), num_heads_u64, rows.rows, rows.wrap, rows.outer};
  cuuint64_t const strides[4] = {stride(num_heads_u64, tensor.head_stride * sizeof(Element)),
                                 stride(rows.rows, rows.row_stride), stride(rows.wrap, rows.wrap_stride),
                                 stride(rows.outer, rows.outer_stride)};
  cuuint32_t const box[5] = {kSlabColumns, 1, static_cast<cuuint32_t>(box_rows), 1, 1};
  cuuint32_t const element_strides[5] = {1, 1, 1, 1, 1};
  constexpr int kSlabBytes = kSlabColumns * sizeof(Element);
  CUtensorMapSwizzle const swizzle = kSlabBytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : kSlabBytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                        : CU_TENSOR_MAP_SWIZZLE_32B;
  CUtensorMap map;
  CUresult const result = tensor_map_encoder()(&map, tensor_map_type<Element>(), 5, tensor.data, sizes, strides, box,
                                               element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  FA3_CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result));
  return map;
}

// Loads one box: `column` of `head_idx`, rows from `row` of the sequence that `rows` finds.
template <class Element>
CUTLASS_DEVICE void load_box(CUtensorMap const& map, uint64_t* barrier, cute::TMA::CacheHintSm90 cache_hint,
                             Element* smem, int column, TmaRows const& rows, int row, int head_idx) {
  cute::SM90_TMA_LOAD_5D::copy(&map, barrier, static_cast<uint64_t>(cache_hint), smem, column, head_idx,
                               rows.row_origin + row, rows.wrap, rows.outer);
}

// Loads rows [row, row + kRows) of one head, kColumns wide, into `smem`, slab after slab.
template <int kRows, int kColumns, int kSlabColumns, class Element>
CUTLASS_DEVICE void load_tile(CUtensorMap const& map, uint64_t* barrier, cute::TMA::CacheHintSm90 cache_hint,
                              Element* smem, TmaRows const& rows, int row, int head_idx) {
  CUTLASS_PRAGMA_UNROLL
  for (int column = 0; column < kColumns; column += kSlabColumns) {
    load_box(map, barrier, cache_hint, smem + column * kRows, column, rows, row, head_idx);
  }
}

// Stores one box, as part of the current bulk group.
template <class Element>
CUTLASS_DEVICE void store_box(CUtensorMap const& map, Element const* smem, int column, TmaRows const& rows, int row,
                              int head_idx) {
  cute::SM90_TMA_STORE_5D::copy(&map, smem, column, head_idx, rows.row_origin + row, rows.wrap, rows.outer);
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
