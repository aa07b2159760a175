// What a Hopper multiprocessor has.
#pragma once

namespace fa3 {

constexpr int kMaxSmemBytes = 227 * 1024;  // of a CTA
constexpr int kRegistersPerSm = 64 * 1024;

// Registers per thread of a CTA that fills the multiprocessor: one producer warpgroup and kConsumerWarpgroups others.
// At entry all have the same share; then the producer gives most of its own away (setmaxnreg).
template <int kConsumerWarpgroups, int kProducer_, int kConsumer_>
struct RegisterSplit {
  static constexpr int kProducer = kProducer_;
  static constexpr int kConsumer = kConsumer_;
  static constexpr int kAtEntry = kRegistersPerSm / ((1 + kConsumerWarpgroups) * 128) / 8 * 8;
  static_assert(kProducer + kConsumerWarpgroups * kConsumer <= (1 + kConsumerWarpgroups) * kAtEntry,
                "setmaxnreg would deadlock, waiting for registers that the CTA does not have");
};

}  // namespace fa3
