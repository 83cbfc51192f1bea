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
#include <utility>

namespace twinscan {
namespace {

// About 2 and 30 µs. Threads finish a step at nearly the same time. If one waits longer, another has
// probably lost its core.
constexpr int kFewSpins = 100, kSpins = 1500;

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

// TWINSCAN_NATIVE_THREADS, which the Python package has checked, or the number of usable cores.
int default_threads() {
  const char* const given = std::getenv("TWINSCAN_NATIVE_THREADS");
  const int count = given == nullptr ? 0 : std::atoi(given);
  return count > 0 ? count : usable_cores();
}

std::atomic<int> most_threads{default_threads()};

bool spin(const Progress& part, int64_t stage, int spins) {
  for (; spins > 0 && !part.done(stage); --spins) pause();
  return spins > 0;
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

  void run(std::shared_ptr<Job> job, int threads) {
    // If another call has the team, this call's thread works alone.
    std::unique_lock<std::mutex> team(busy_, std::defer_lock);
    const bool together = threads > 1 && team.try_lock();
    if (together) post(job, threads);
    job->work(0);
    if (together) post(nullptr, 0);
  }

  // Spins for a while, and then sleeps.
  void wait(const Progress& part, int64_t stage) {
    if (spin(part, stage, kSpins)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    // A thread that ends a stage does so before it reads `asleep_`, and this one reads the stage
    // after it has set `asleep_`, so that one of the two sees the other.
    for (asleep_.store(true); !part.done(stage); asleep_.store(true)) waiting_.wait(lock);
  }

  void wake() {
    if (!asleep_.load()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      asleep_.store(false);
    }
    waiting_.notify_all();
  }

 private:
  // Gives the idle threads a job, or takes it from those that have not begun it.
  void post(std::shared_ptr<Job> job, int threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_.swap(job);
      wanted_ = threads;
      ++posts_;
      try {
        for (; threads_ < threads; ++threads_) {
          std::thread([this, thread = threads_] { serve(thread); }).detach();
        }
      } catch (const std::exception&) {  // no more threads: work with those that there are
      }
    }
    if (threads > 1) idle_.notify_all();
  }

  void serve(int thread) {
    for (long seen = 0;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      idle_.wait(lock, [&] { return posts_ != seen && thread < wanted_; });
      seen = posts_;
      const std::shared_ptr<Job> job = job_;
      lock.unlock();
      job->work(thread);
    }
  }

  std::mutex busy_;  // held by the call that has the team
  std::mutex mutex_;
  std::condition_variable idle_, waiting_;
  std::atomic<bool> asleep_{false};  // whether a thread may sleep in `wait`
  int threads_ = 1;                  // the calling thread, and those that were started
  std::shared_ptr<Job> job_;
  int wanted_ = 0;  // the number of threads that work on the job
  long posts_ = 0;
};

struct Block {
  size_t bytes;
};
constexpr size_t kHeader = 64, kMostKept = size_t{256} << 20;
std::atomic<Block*> kept{nullptr};

}  // namespace

int threads() { return most_threads.load(); }

void set_threads(int count) { most_threads.store(std::max(1, count)); }

void run(std::shared_ptr<Job> job, int threads) { Team::get().run(std::move(job), threads); }

bool done_soon(const Progress& part, int64_t stage) { return spin(part, stage, kFewSpins); }

void wait(const Progress& part, int64_t stage) {
  if (!part.done(stage)) Team::get().wait(part, stage);
}

void wake() { Team::get().wake(); }

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

int64_t choose_parts(int64_t rows, int64_t units, int threads) {
  if (threads == 1) return 1;
  const auto time = [&](int64_t parts) {
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    return ceil_div(rows * parts, threads) * (ceil_div(units, parts) + 1);
  };
  int64_t fastest = 1;
  for (int64_t parts = 2; parts <= std::min<int64_t>(units, threads); ++parts) {
    if (time(parts) < time(fastest)) fastest = parts;
  }
  // With up to four tasks for each thread, a thread that loses its core delays only a small one.
  int64_t parts = std::min(units, int64_t{4} * threads / std::max<int64_t>(rows, 1));
  while (parts > fastest && time(parts) > time(fastest) * 9 / 8) --parts;
  return std::max(parts, fastest);
}

TaskJob::TaskJob(int64_t tasks, int threads, size_t scratch_bytes, size_t shared_bytes,
                 int64_t group_size)
    : threads_(int(std::min<int64_t>(threads, std::max<int64_t>(tasks, 1)))),
      scratch_bytes_((scratch_bytes + 63) / 64 * 64),
      shared_bytes_((shared_bytes + 63) / 64 * 64),
      group_size_(group_size),
      memory_(shared_bytes_ + scratch_bytes_ * threads_),
      progress_(tasks),
      ended_(tasks / group_size) {}

void TaskJob::work(int thread) {
  void* const scratch = shared() + shared_bytes_ + scratch_bytes_ * thread;
  for (size_t task = 0; task < progress_.size(); ++task) {
    if (!progress_[task].begin(0)) continue;
    run_task(task, scratch);
    const int64_t group = task / group_size_;
    if (group_size_ > 1 && ++ended_[group] == group_size_) finish_group(group);
    progress_[task].end(0);
    wake();
  }
  if (thread > 0) return;
  for (size_t task = 0; task < progress_.size(); ++task) wait_for(task);  // the call returns
}

}  // namespace twinscan

extern "C" __attribute__((visibility("default"))) int twinscan_threads() {
  return twinscan::threads();
}

extern "C" __attribute__((visibility("default"))) void twinscan_set_threads(int count) {
  twinscan::set_threads(count);
}
