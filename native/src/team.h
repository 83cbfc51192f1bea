// A team of threads that run a kernel together.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace twinscan {

// The number of threads that a call may use: the number of cores that this process may use, unless
// TWINSCAN_NATIVE_THREADS or `set_threads` says otherwise.
int threads();
void set_threads(int count);

// How far a part of a job has come. A part has stages 0, 1, …, which follow one another. Whichever
// thread begins a stage first runs it, so that nobody waits for a thread that has no core.
class Progress {
 public:
  // Whether this call begins the stage. The stage before it must be done.
  bool begin(int64_t stage) {
    return begun_.load(std::memory_order_relaxed) == stage &&
           begun_.compare_exchange_strong(stage, stage + 1);
  }
  void end(int64_t stage) { done_.store(stage + 1); }
  bool done(int64_t stage) const { return done_.load() > stage; }

 private:
  // Other threads often read what is done, and seldom what has begun. Each has a line of the cache.
  alignas(128) std::atomic<int64_t> begun_{0};
  alignas(128) std::atomic<int64_t> done_{0};
};

// The work of a call. A thread may still hold a job after its call has returned, but then finds no
// stage to begin.
class Job {
 public:
  virtual ~Job() = default;

  // Begins stages until none is left, as thread 0 … threads − 1. One thread alone does all the work.
  virtual void work(int thread) = 0;
};

// Works on a job with idle threads of the team, at most `threads` with this one.
void run(std::shared_ptr<Job> job, int threads);

// Whether a stage is done, after at most some µs.
bool done_soon(const Progress& part, int64_t stage);

// Waits until a stage is done, which another thread has begun.
void wait(const Progress& part, int64_t stage);

// Wakes the threads that wait for stages. Call it after each `end`.
void wake();

// Gives out parts of a block of memory, aligned to cache lines. Without a block, only counts bytes.
class Arena {
 public:
  explicit Arena(void* block = nullptr) : next_(reinterpret_cast<uintptr_t>(block)) {}

  template <typename T>
  T* take(int64_t count) {
    T* start = reinterpret_cast<T*>(next_);
    next_ += (size_t(count) * sizeof(T) + 63) / 64 * 64;
    return start;
  }

  size_t bytes() const { return next_; }

 private:
  uintptr_t next_;
};

// The memory of one call. The last block is kept for the next call, because touching fresh pages
// takes as long as some kernels.
class Memory {
 public:
  explicit Memory(size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* start() const { return static_cast<char*>(block_) + 64; }

 private:
  void* block_;
};

// Into how many parts to divide the work of each row, if a part takes as long as its units of work and
// one more.
int64_t choose_parts(int64_t rows, int64_t units, int threads);

// A job of tasks. Each thread has memory of its own for them, and the tasks share some, too. No more
// threads work on a job than it has tasks. Each `group_size` tasks, in order, are a group.
class TaskJob : public Job {
 public:
  TaskJob(int64_t tasks, int threads, size_t scratch_bytes, size_t shared_bytes = 0,
          int64_t group_size = 1);
  void work(int thread) final;
  int num_threads() const { return threads_; }

 protected:
  virtual void run_task(int64_t task, void* scratch) = 0;

  // Runs after the tasks of each group, if there are several in it.
  virtual void finish_group(int64_t) {}

  // A task may wait for those with lower numbers, which have begun.
  void wait_for(int64_t task) const { wait(progress_[task], 0); }
  char* shared() const { return static_cast<char*>(memory_.start()); }

 private:
  const int threads_;
  const size_t scratch_bytes_, shared_bytes_;
  const int64_t group_size_;
  const Memory memory_;
  std::vector<Progress> progress_;
  std::vector<std::atomic<int64_t>> ended_;  // of each group: the tasks that have ended
};

}  // namespace twinscan
