// The selective scan of Mamba:
//
//     h_t = exp(Δ_t A) ⊙ h_{t−1} + B_t (Δ_t ⊙ u_t)ᵀ,   y_t = h_tᵀ C_t
//
// Time is divided into chunks. In each, a few states of a vector of features stay in registers for
// all steps. The backward pass goes through the chunks in the opposite order. It computes the states
// of a chunk again, from the state before it, which the forward pass has kept. With the gradient
//
//     g_t = C_t ∂y_tᵀ + exp(Δ_{t+1} A) ⊙ g_{t+1}
//
// of h_t, the exponent Δ_t A of step t has the gradient g_t ⊙ exp(Δ_t A) ⊙ h_{t−1}.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "call.h"
#include "rows.h"
#include "team.h"

namespace twinscan::TWINSCAN_ISA {

// The number of states of a feature that stay in registers, with their A and their gradients.
constexpr int kStates = kRegisters / 8;

// A vector for each step of a chunk.
template <typename T>
using Steps = Vector<T>[kSelectiveScanChunk];

// What the forward and the backward pass share. A task has some of the features of a row of the
// batch.
template <typename Call>
class SelectiveScanJob : public TaskJob {
 public:
  using T = typename Call::Real;

  SelectiveScanJob(const Call& call, int threads, size_t scratch, size_t shared = 0)
      : TaskJob(call.batch * call.parts, threads, scratch, shared, call.parts), call_(call) {}

  // A part adds up lanes for the gradients of B and C, which takes about as long as a vector.
  static Call divided(Call call, int threads) {
    call.parts = choose_parts(call.batch, ceil_div(call.features, kLanes<T>), threads);
    return call;
  }

  // Each thread is worth its waking from about 100,000 exponentials on.
  static double useful_threads(const Call& call) {
    return double(call.batch) * double(call.time) * double(call.features) * double(call.states) /
           1e5;
  }

 protected:
  // Some features in a chunk of steps of a row.
  struct Block {
    const Call& call;
    int64_t b, chunk, t, steps;  // the first step, and how many
    int64_t c, count;            // the first feature, and how many: a vector, or fewer at the end

    int64_t of_step(int64_t i) const { return (b * call.time + t + i) * call.features + c; }
    int64_t of_state(int64_t n) const { return (b * call.states + n) * call.features + c; }
    int64_t of_before(int64_t n) const {
      const int64_t chunks = ceil_div(call.time, kSelectiveScanChunk);
      return ((b * chunks + chunk) * call.states + n) * call.features + c;
    }
    bool restarts(int64_t i) const { return call.reset[b * call.time + t + i]; }
    const T* keys(const T* of_steps) const { return of_steps + (b * call.time + t) * call.states; }

    // Also fetches the numbers of the next block, since the vectors of a block lie far apart.
    Vector<T> read(const T* from) const {
      __builtin_prefetch(from + kLanes<T>);
      return load(from, count);
    }
    void read_steps(const T* from, Steps<T>& to) const {
      for (int64_t i = 0; i < steps; ++i) to[i] = read(from + of_step(i));
    }
    void write_steps(const Steps<T>& from, T* to) const {
      for (int64_t i = 0; i < steps; ++i) store(to + of_step(i), from[i], count);
    }
    // The states n, n + 1, … of the features, from the place of state n on
    template <int kCount>
    void read_states(const T* from, Vector<T> (&to)[kCount]) const {
      for (int i = 0; i < kCount; ++i) to[i] = read(from + i * call.features);
    }
    template <int kCount>
    void write_states(const Vector<T> (&from)[kCount], T* to) const {
      for (int i = 0; i < kCount; ++i) store(to + i * call.features, from[i], count);
    }
    void read_scaled(Steps<T>& dt, Steps<T>& scaled) const {
      read_steps(call.dt, dt);
      read_steps(call.u, scaled);
      for (int64_t i = 0; i < steps; ++i) scaled[i] *= dt[i];
    }
  };

  // Calls `run` for each vector of features of a task, in one chunk.
  template <typename Run>
  void for_each_block(int64_t task, int64_t chunk, Run run) const {
    const int64_t parts = call_.parts, b = task / parts, part = task % parts;
    const int64_t t = chunk * kSelectiveScanChunk;
    const int64_t steps = std::min(kSelectiveScanChunk, call_.time - t);
    const int64_t blocks = ceil_div(call_.features, kLanes<T>);
    for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block) {
      const int64_t c = block * kLanes<T>;
      run(Block{call_, b, chunk, t, steps, c, std::min<int64_t>(kLanes<T>, call_.features - c)});
    }
  }

  // Calls run(n, count) for the states n … n + count − 1, until all have run.
  template <typename Run>
  void for_each_group(Run run) const {
    int64_t n = 0;
    for (; n + kStates <= call_.states; n += kStates) {
      run(n, std::integral_constant<int, kStates>());
    }
    for (; n < call_.states; ++n) run(n, std::integral_constant<int, 1>());
  }

  const Call call_;
};

template <typename T>
class SelectiveScanForwardJob : public SelectiveScanJob<SelectiveScanForward<T>> {
 public:
  using Call = SelectiveScanForward<T>;
  using Base = SelectiveScanJob<Call>;
  using Base::call_;
  using typename Base::Block;

  SelectiveScanForwardJob(const Call& call, int threads) : Base(call, threads, 0) {}

 private:
  void run_task(int64_t task, void*) override {
    this->for_each_block(task, 0, [&](const Block& block) { start(block); });
    for (int64_t chunk = 0; chunk < ceil_div(call_.time, kSelectiveScanChunk); ++chunk) {
      this->for_each_block(task, chunk, [&](const Block& block) { run_block(block); });
    }
  }

  // Between chunks, the state is in the array of the last states.
  void start(const Block& block) const {
    for (int64_t n = 0; n < call_.states; ++n) {
      std::copy_n(call_.state + block.of_state(n), block.count, call_.last + block.of_state(n));
    }
  }

  void run_block(const Block& block) const {
    Steps<T> dt, scaled, y;
    block.read_scaled(dt, scaled);
    std::fill_n(y, block.steps, Vector<T>{});
    this->for_each_group([&](int64_t n, auto group) {
      constexpr int kCount = group;
      const T* const B = block.keys(call_.B);
      const T* const C = block.keys(call_.C);
      Vector<T> A[kCount], h[kCount];
      block.read_states(call_.A + block.of_state(n), A);
      block.read_states(call_.last + block.of_state(n), h);
      if (call_.before) block.write_states(h, call_.before + block.of_before(n));
      for (int64_t t = 0; t < block.steps; ++t) {
        const int64_t key = t * call_.states + n;
        if (block.restarts(t)) std::fill_n(h, kCount, Vector<T>{});
        for (int i = 0; i < kCount; ++i) {
          h[i] = exp_or_zero<T>(dt[t] * A[i]) * h[i] + B[key + i] * scaled[t];
          y[t] += C[key + i] * h[i];
        }
      }
      block.write_states(h, call_.last + block.of_state(n));
    });
    block.write_steps(y, call_.y);
  }
};

template <typename T>
class SelectiveScanBackwardJob : public SelectiveScanJob<SelectiveScanBackward<T>> {
 public:
  using Call = SelectiveScanBackward<T>;
  using Base = SelectiveScanJob<Call>;
  using Base::call_;
  using typename Base::Block;

  SelectiveScanBackwardJob(const Call& call, int threads)
      : Base(call, threads, 5 * kSelectiveScanChunk * call.states * sizeof(Vector<T>) / 2,
             call.parts == 1 ? 0 : call.batch * call.parts * 2 * of_row(call) * sizeof(T)) {}

 private:
  void run_task(int64_t task, void* scratch) override {
    const auto [dB_of_part, dC_of_part] = of_task(task);
    // The gradients of B and C, as sums over the blocks: (step, state)
    const int64_t size = kSelectiveScanChunk * call_.states;
    Vector<T>* const dB = static_cast<Vector<T>*>(scratch);
    Vector<T>* const dC = dB + size;
    this->for_each_block(task, 0, [&](const Block& block) { start(block); });
    for (int64_t chunk = ceil_div(call_.time, kSelectiveScanChunk) - 1; chunk >= 0; --chunk) {
      std::fill_n(dB, 2 * size, Vector<T>{});
      this->for_each_block(task, chunk, [&](const Block& block) { run_block(block, dB, dC); });
      const int64_t t = chunk * kSelectiveScanChunk;
      const int64_t steps = std::min(kSelectiveScanChunk, call_.time - t);
      const auto numbers = [](Vector<T>* vectors) { return reinterpret_cast<T*>(vectors); };
      sum_lanes_of_each(numbers(dB), steps * call_.states, numbers(dC + size),
                        dB_of_part + t * call_.states);
      sum_lanes_of_each(numbers(dC), steps * call_.states, numbers(dC + size),
                        dC_of_part + t * call_.states);
    }
  }

  static int64_t of_row(const Call& call) { return call.time * call.states; }

  // Where a task, which is part task % parts of row task / parts, writes the gradients of B and C.
  std::array<T*, 2> of_task(int64_t task) const {
    const int64_t size = of_row(call_);
    if (call_.parts == 1) return {call_.dB + task * size, call_.dC + task * size};
    T* const start = reinterpret_cast<T*>(this->shared()) + task * 2 * size;
    return {start, start + size};
  }

  // Adds up what the parts of a row have written.
  void finish_group(int64_t b) override {
    const int64_t size = of_row(call_);
    T* const sums[] = {call_.dB + b * size, call_.dC + b * size};
    for (int i = 0; i < 2; ++i) {
      std::fill_n(sums[i], size, T(0));
      for (int64_t part = 0; part < call_.parts; ++part) {
        const T* const from = of_task(b * call_.parts + part)[i];
        for (int64_t j = 0; j < size; ++j) sums[i][j] += from[j];
      }
    }
  }

  // Between chunks, the gradients of the state and of A are in the arrays of the results.
  void start(const Block& block) const {
    for (int64_t n = 0; n < call_.states; ++n) {
      std::copy_n(call_.dlast + block.of_state(n), block.count, call_.dstate + block.of_state(n));
      std::fill_n(call_.dA + block.of_state(n), block.count, T(0));
    }
  }

  void run_block(const Block& block, Vector<T>* dB, Vector<T>* dC) const {
    Steps<T> dt, scaled, dy, ddt, dscaled;
    block.read_scaled(dt, scaled);
    block.read_steps(call_.dy, dy);
    std::fill_n(ddt, block.steps, Vector<T>{});
    std::fill_n(dscaled, block.steps, Vector<T>{});
    this->for_each_group([&](int64_t n, auto group) {
      constexpr int kCount = group;
      const T* const B = block.keys(call_.B);
      const T* const C = block.keys(call_.C);
      Vector<T> A[kCount], h[kCount], g[kCount], dA[kCount];
      block.read_states(call_.A + block.of_state(n), A);
      block.read_states(call_.before + block.of_before(n), h);
      block.read_states(call_.dstate + block.of_state(n), g);
      block.read_states(call_.dA + block.of_state(n), dA);
      // exp(Δ_t A), and its product with the state before the step
      Vector<T> factor[kSelectiveScanChunk][kCount], kept[kSelectiveScanChunk][kCount];
      for (int64_t t = 0; t < block.steps; ++t) {
        const int64_t key = t * call_.states + n;
        if (block.restarts(t)) std::fill_n(h, kCount, Vector<T>{});
        for (int i = 0; i < kCount; ++i) {
          factor[t][i] = exp_or_zero<T>(dt[t] * A[i]);
          kept[t][i] = factor[t][i] * h[i];
          h[i] = kept[t][i] + B[key + i] * scaled[t];
        }
      }
      for (int64_t t = block.steps - 1; t >= 0; --t) {
        const int64_t key = t * call_.states + n;
        for (int i = 0; i < kCount; ++i) {
          dC[key + i] += (kept[t][i] + B[key + i] * scaled[t]) * dy[t];
          g[i] += C[key + i] * dy[t];
          dB[key + i] += g[i] * scaled[t];
          dscaled[t] += B[key + i] * g[i];
          const Vector<T> dexponent = g[i] * kept[t][i];
          ddt[t] += dexponent * A[i];
          dA[i] += dexponent * dt[t];
          g[i] *= factor[t][i];
        }
        if (block.restarts(t)) std::fill_n(g, kCount, Vector<T>{});
      }
      block.write_states(g, call_.dstate + block.of_state(n));
      block.write_states(dA, call_.dA + block.of_state(n));
    });
    Steps<T> u;
    block.read_steps(call_.u, u);
    for (int64_t t = 0; t < block.steps; ++t) {
      ddt[t] += dscaled[t] * u[t];
      dscaled[t] *= dt[t];
    }
    block.write_steps(ddt, call_.ddt);
    block.write_steps(dscaled, call_.du);
  }
};

}  // namespace twinscan::TWINSCAN_ISA
