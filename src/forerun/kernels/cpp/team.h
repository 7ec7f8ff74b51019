// The threads of a parallel region: who does what, and where they meet.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace forerun {

// The part from .. to of a range that thread `index` of `count` takes.
struct Share {
  int64_t from, to;
  Share(int64_t size, int64_t index, int64_t count)
      : from(size * index / count), to(size * (index + 1) / count) {}
};

// Where the threads of one region meet. A step has hundreds of phases of a few microseconds each; a
// barrier that puts its threads to sleep would cost more than the phases. So threads spin, and after
// a while offer their core to others: on a busy machine the missing thread may be waiting for it.
class Meeting {
 public:
  // Return when all threads have come; what they wrote before is visible.
  void wait(int64_t num_threads) {
    const int64_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      arrived_.store(0, std::memory_order_relaxed);
      next_item_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int64_t turn = 0; round_.load(std::memory_order_acquire) == round; turn++)
      turn < kSpins ? _mm_pause() : void(sched_yield());
  }
  // The numbers 0, 1, 2, ... since the threads last met.
  int64_t take_item() { return next_item_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static constexpr int64_t kSpins = 4000;
  alignas(64) std::atomic<int64_t> arrived_{0};
  std::atomic<int64_t> next_item_{0};
  alignas(64) std::atomic<int64_t> round_{0};
};

// One thread of a region.
struct Team {
  Meeting &meeting;
  int64_t thread = omp_get_thread_num();
  int64_t num_threads = omp_get_num_threads();

  Share share(int64_t size) const { return Share(size, thread, num_threads); }
  void wait() const { meeting.wait(num_threads); }
};

}  // namespace forerun
