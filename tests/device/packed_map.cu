// Loads and stores boxes of packed sequences through the tensor maps of csrc/common/tma.cuh, and compares every
// element. A load of rows past a sequence's end must give zeros, and a store must leave what lies there as it is,
// though another sequence follows in memory. Prints what is wrong, and exits with 1.
#include <cstdio>
#include <vector>

#include "common/pipeline.cuh"
#include "common/tma.cuh"

using Element = cutlass::bfloat16_t;
constexpr int kColumns = 64, kHeads = 3, kBoxRows = 16, kHead = 1;

__global__ void copy_box(__grid_constant__ CUtensorMap const map, fa3::TmaRows rows, int row, bool store,
                         Element* box) {
  __shared__ alignas(1024) Element smem[kBoxRows * kColumns];
  __shared__ alignas(8) char pipeline_storage[sizeof(fa3::Pipeline<1>)];
  auto& pipeline = *reinterpret_cast<fa3::Pipeline<1>*>(pipeline_storage);
  if (threadIdx.x == 0) {
    pipeline.init(1);
    cutlass::arch::fence_barrier_init();
  }
  for (int i = threadIdx.x; i < kBoxRows * kColumns; i += blockDim.x) {
    smem[i] = Element(-1.f);
  }
  cutlass::arch::fence_view_async_shared();
  __syncthreads();
  fa3::PipelineState<1> const state;
  if (threadIdx.x == 0 && store) {
    fa3::store_box(map, smem, 0, rows, row, kHead);
    cute::tma_store_arrive();
    fa3::wait_bulk_writes();
  }
  if (threadIdx.x == 0 && !store) {
    uint64_t* barrier = pipeline.acquire(state, sizeof(smem));
    fa3::load_box(map, barrier, cute::TMA::CacheHintSm90::EVICT_NORMAL, smem, 0, rows, row, kHead);
  }
  if (!store) {
    pipeline.wait(state);
    for (int i = threadIdx.x; i < kBoxRows * kColumns; i += blockDim.x) {
      box[i] = smem[i];
    }
  }
}

int main() {
  std::vector<int> const lengths{5, 0, 37, 16, 1, 100, 0, 15};
  int total = 0;
  for (int length : lengths) {
    total += length;
  }
  // Row r holds r + 1 in every column; rows behind the last sequence belong to the buffer and to nobody.
  std::vector<Element> const original = [&] {
    std::vector<Element> buffer;
    for (int row = 0; row < total + 32; ++row) {
      buffer.insert(buffer.end(), kHeads * kColumns, Element(float(row + 1)));
    }
    return buffer;
  }();
  size_t const bytes = original.size() * sizeof(Element);
  Element *tensor, *box;
  FA3_CHECK_CUDA(cudaMalloc(&tensor, bytes));
  FA3_CHECK_CUDA(cudaMalloc(&box, kBoxRows * kColumns * sizeof(Element)));
  fa3::TensorArg const argument{tensor, 0, kHeads * kColumns, kColumns};
  CUtensorMap const map = fa3::make_tensor_map<Element, kColumns>(argument, kColumns, kHeads,
                                                                  fa3::packed_rows<Element>(argument, total), kBoxRows);

  int wrong = 0, checked = 0;
  auto const check = [&](char const* what, int length, int row, int at, float got, float expected) {
    ++checked;
    if (got != expected && wrong++ < 10) {
      std::printf("%s of row %d of %d: row %d is %g, not %g\n", what, row, length, at, got, expected);
    }
  };
  int first = 0;
  for (int length : lengths) {
    fa3::TmaRows const rows = fa3::packed_sequence(first, length);
    for (int row = 0; row < length + kBoxRows; row += kBoxRows) {
      FA3_CHECK_CUDA(cudaMemcpy(tensor, original.data(), bytes, cudaMemcpyHostToDevice));
      copy_box<<<1, 128>>>(map, rows, row, /*store=*/false, box);
      std::vector<Element> loaded(kBoxRows * kColumns);
      FA3_CHECK_CUDA(cudaMemcpy(loaded.data(), box, loaded.size() * sizeof(Element), cudaMemcpyDeviceToHost));
      for (int i = 0; i < kBoxRows * kColumns; ++i) {
        int const at = row + i / kColumns;
        check("load", length, row, at, float(loaded[i]), at < length ? float(first + at + 1) : 0.f);
      }
      copy_box<<<1, 128>>>(map, rows, row, /*store=*/true, box);
      std::vector<Element> stored(original.size());
      FA3_CHECK_CUDA(cudaMemcpy(stored.data(), tensor, bytes, cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < stored.size(); ++i) {
        int const at = int(i / (kHeads * kColumns)) - first, head = int(i / kColumns) % kHeads;
        bool const written = head == kHead && at >= row && at < row + kBoxRows && at < length;
        check("store", length, row, at, float(stored[i]), written ? -1.f : float(original[i]));
      }
    }
    first += length;
  }
  std::printf("%d elements checked, %d wrong\n", checked, wrong);
  return wrong == 0 ? 0 : 1;
}
