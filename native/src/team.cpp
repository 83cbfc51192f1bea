#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace twinscan {
namespace {

// About 30 µs. Threads finish a step at nearly the same time. If one waits longer, another has
// probably lost its core.
constexpr int kSpins = 1500;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The number of cores that this process may use, which is also the size of XLA's thread pool.
int usable_cores() {
#if defined(__linux__)
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

class Team {
 public:
  static Team& get() {
    // A forked child has none of its parent's threads, so it starts a team of its own. Teams are
    // never destroyed: their threads sleep until the process ends.
    static std::atomic<Team*> team = [] {
      pthread_atfork(nullptr, nullptr, [] { team = new Team; });
      return new Team;
    }();
    return *team;
  }

  int join(int wanted) {
    if (wanted <= 1) return 1;
    // Waiting, rather than running alone, makes the results independent of other calls: the
    // number of threads decides in which order sums are added.
    busy_.lock();
    wanted = std::min(wanted, static_cast<int>(members_.size()));
    try {
      for (; threads_ < wanted; ++threads_) {
        std::thread([this, thread = threads_, seen = job_] { work(thread, seen); }).detach();
      }
    } catch (const std::exception&) {  // no more threads: work with those that there are
    }
    const int size = std::min(wanted, threads_);
    if (size == 1) busy_.unlock();
    return size;
  }

  void leave() { busy_.unlock(); }

  void run(int size, void (*task)(void*, int), void* context) {
    for (Member& member : members_) member.meetings.store(0, std::memory_order_relaxed);
    unfinished_.store(size - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      size_ = size;
      ++job_;
    }
    idle_.notify_all();
    task(context, 0);
    wait([&] { return unfinished_.load() == 0; });
  }

  void meet(int thread, int first, int count) {
    const long meeting = members_[thread].meetings.load(std::memory_order_relaxed) + 1;
    members_[thread].meetings.store(meeting);
    wake();
    for (int other = first; other < first + count; ++other) {
      wait([&] { return members_[other].meetings.load() >= meeting; });
    }
  }

 private:
  struct alignas(128) Member {
    std::atomic<long> meetings{0};
  };

  void work(int thread, long seen) {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      idle_.wait(lock, [&] { return job_ != seen; });
      seen = job_;
      if (thread >= size_) continue;
      const auto task = task_;
      void* const context = context_;
      lock.unlock();
      task(context, thread);
      unfinished_.fetch_sub(1);
      wake();
    }
  }

  // Spins for a while, and then sleeps until `ready`.
  template <typename Ready>
  void wait(Ready ready) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (ready()) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    ++sleepers_;
    // A thread that makes `ready` true does so before it reads `sleepers_`, and this one reads it
    // after, so that one of the two sees the other.
    waiting_.wait(lock, ready);
    --sleepers_;
  }

  void wake() {
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    waiting_.notify_all();
  }

  std::mutex busy_;  // held by the call that has the team
  std::mutex mutex_;
  std::condition_variable idle_, waiting_;
  std::vector<Member> members_ = std::vector<Member>(usable_cores());
  int threads_ = 1;  // the calling thread, and those that were started
  std::atomic<int> sleepers_{0}, unfinished_{0};
  void (*task_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int size_ = 0;
  long job_ = 0;
};

struct Block {
  size_t bytes;
};
constexpr size_t kHeader = 64, kMostKept = size_t{256} << 20;
std::atomic<Block*> kept{nullptr};

}  // namespace

Crew::Crew(int wanted) : size_(Team::get().join(wanted)) {}

Crew::~Crew() {
  if (size_ > 1) Team::get().leave();
}

void Crew::run(int size, void (*task)(void*, int), void* context) {
  if (size == 1) {
    task(context, 0);
  } else {
    Team::get().run(size, task, context);
  }
}

void Crew::meet(int thread, int first, int count) {
  if (count > 1) Team::get().meet(thread, first, count);
}

Memory::Memory(size_t bytes) {
  bytes = (bytes + kHeader + 63) / 64 * 64;
  Block* block = kept.exchange(nullptr);
  if (block == nullptr || block->bytes < bytes) {
    std::free(block);
    block = static_cast<Block*>(std::aligned_alloc(64, bytes));
    if (block == nullptr) throw std::bad_alloc();
    block->bytes = bytes;
  }
  block_ = block;
}

Memory::~Memory() {
  Block* block = static_cast<Block*>(block_);
  std::free(block->bytes <= kMostKept ? kept.exchange(block) : block);
}

}  // namespace twinscan
