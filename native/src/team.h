// A team of threads that run a kernel together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twinscan {

// A group of threads for one call: the calling thread, and idle threads of the team.
class Crew {
 public:
  // Takes at most `wanted` threads, after waiting for the call that has the team.
  explicit Crew(int wanted);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  int size() const { return size_; }

  // Calls task(context, thread) on threads 0 … size − 1, and returns when all have ended.
  void run(int size, void (*task)(void* context, int thread), void* context);

  // Waits until the threads [first, first + count) have called `meet` as often as this one.
  void meet(int thread, int first, int count);

 private:
  int size_;
};

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

}  // namespace twinscan
