// Named barriers of the CTA. CUTLASS keeps hardware ids 0 to 7 and adds 8 to the ids below.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

namespace fa3 {

// forward      waits                    arrives                          threads
// kTurn + w    consumer warpgroup w     the warpgroup whose turn ended   256
namespace fwd {
enum NamedBarrier : uint32_t { kTurn = 0 };
}

// backward         waits                    arrives                   threads
// kConsumers       all consumers            all consumers             256
// kWarpgroup + w   consumer warpgroup w     consumer warpgroup w      128   consumer.cuh
//                  consumer warpgroup w     the other one too         256   consumer_split.cuh
namespace bwd {
enum NamedBarrier : uint32_t { kConsumers = 0, kWarpgroup = 1 };
}

// The warp scheduler barrier of FlashAttention-3: the consumer warpgroups issue their GEMMs in turn (ping-pong), so
// that the softmax of one runs while the tensor cores work for the others. Every warpgroup takes one turn per key block
// of the CTA's tile, also for a block that it skips.
template <int kNumWarpgroups>
struct PingPong {
  static constexpr uint32_t kNumThreads = 2 * cutlass::NumThreadsPerWarpGroup;

  // Called once by each warpgroup: the last one gives the first its first turn.
  CUTLASS_DEVICE static void start(int warpgroup_idx) {
    if (warpgroup_idx == kNumWarpgroups - 1) {
      pass_turn(warpgroup_idx);
    }
  }

  CUTLASS_DEVICE static void wait_turn(int warpgroup_idx) {
    cutlass::arch::NamedBarrier::sync(kNumThreads, fwd::kTurn + warpgroup_idx);
  }

  CUTLASS_DEVICE static void pass_turn(int warpgroup_idx) {
    int const next = warpgroup_idx + 1 == kNumWarpgroups ? 0 : warpgroup_idx + 1;
    cutlass::arch::NamedBarrier::arrive(kNumThreads, fwd::kTurn + next);
  }
};

}  // namespace fa3
