// Linear attention with a decay in each step, which is the recurrence of Mamba-2:
//
//     S_t = α_t S_{t−1} + v_t k_tᵀ,   y_t = S_t q_t
//
// Each head of v has a state S and decays of its own, and several heads share a head of q and k. A
// chunk of steps is computed by products of matrices. From the state S before a chunk,
//
//     y_t = e_t S q_t + Σ_{i≤t} M_ti v_i,   M_ti = D_ti (q_t·k_i),   S ← Π S + Σ_i f_i v_i k_iᵀ
//
// where D_ti is the product of the decays of the steps i + 1 … t, e_t that of the steps up to t, f_i
// that of the steps after i, and Π that of all steps. The backward pass goes through the chunks in
// the opposite order, from the states before them, which the forward pass has kept.
#pragma once

#include <algorithm>
#include <array>

#include "call.h"
#include "rows.h"
#include "team.h"
#include "tile_product.h"

namespace twinscan::TWINSCAN_ISA {

constexpr int64_t kChunk = kLinearAttentionChunk;

// The decays of a chunk of one head.
template <typename T>
struct Decays {
  T between[kChunk * kChunk];  // D_ti, and 0 if i > t
  T from_start[kChunk], to_end[kChunk];
  T whole;

  // Each sum of log decays has only the terms that it needs, so that a strong decay costs the other
  // steps no digits.
  void set(const T* log_decay, int64_t distance, int64_t count) {
    const int64_t columns = padded<T>(count);
    T sums[kChunk] = {}, total = 0;
    std::fill_n(from_start, columns, T(0));
    for (int64_t t = 0; t < count; ++t) {
      const T now = log_decay[t * distance];
      total += now;
      from_start[t] = total;
      for (int64_t i = 0; i < t; ++i) sums[i] += now;
      T* const row = between + t * kChunk;
      for (int64_t i = 0; i < columns; i += kLanes<T>) {
        store(row + i, exp_or_limit<T>(load(sums + i)));
      }
      std::fill(row + t + 1, row + columns, T(0));
    }
    for (int64_t t = 0; t < columns; t += kLanes<T>) {
      store(from_start + t, exp_or_limit<T>(load(from_start + t)));
    }
    if (count > 0) std::copy_n(between + (count - 1) * kChunk, count, to_end);
    whole = count > 0 ? from_start[count - 1] : T(1);
  }
};

// The arrays of a task, which both passes need. Each pass adds its own.
template <typename T>
struct LinearAttentionScratch : Arena {
  LinearAttentionScratch(const LinearAttention<T>& call, void* memory)
      : Arena(memory), call(call) {}

  T* take(int64_t count) { return Arena::take<T>(count); }

  const LinearAttention<T>& call;
  const int64_t of_k = padded<T>(call.features), of_v = padded<T>(call.values);
  const int64_t of_state = call.features * of_v;
  const int64_t heads = ceil_div(call.heads / call.key_heads, call.parts);  // the most of a task
  T* const q = take(kChunk * of_k);  // (step, feature)
  T* const k = take(kChunk * of_k);
  T* const k_by_feature = take(call.features * kChunk);  // (feature, step)
  T* const scores = take(kChunk * kChunk);               // q_t·k_i
  Decays<T>& decays = *Arena::take<Decays<T>>(1);        // of one head
};

// What the forward and the backward pass share: the division over threads, and the products q_t·k_i
// of a chunk. A task has some of the heads that share a head of q and k, in one row of the batch.
template <typename Call>
class LinearAttentionJob : public TaskJob {
 public:
  using T = typename Call::Real;

  LinearAttentionJob(const Call& call, int threads, size_t scratch, size_t shared = 0)
      : TaskJob(call.batch * call.key_heads * call.parts, threads, scratch, shared, call.parts),
        call_(call),
        parts_(call.parts),
        heads_per_key_(call.heads / call.key_heads),
        chunks_(ceil_div(call.time, kChunk)) {}

  // A part computes q_t·k_i and its gradients, which takes about as long as a head.
  static Call divided(Call call, int threads) {
    call.parts = choose_parts(call.batch * call.key_heads, call.heads / call.key_heads, threads);
    return call;
  }

  // Each thread is worth its waking from about a million multiplications on.
  static double useful_threads(const Call& call) {
    return double(call.batch) * double(call.heads) * double(call.time) * double(call.features) *
           double(call.values) / 1e6;
  }

 protected:
  void read_chunk(const LinearAttentionScratch<T>& s, int64_t b, int64_t g, int64_t t,
                  int64_t count) const {
    const int64_t features = call_.features, distance = call_.key_heads * features;
    const int64_t start = ((b * call_.time + t) * call_.key_heads + g) * features;
    copy_rows(call_.q + start, distance, count, features, s.q);
    copy_rows(call_.k + start, distance, count, features, s.k);
    transpose(call_.k + start, distance, count, features, s.k_by_feature, kChunk);
    set_product<T>(count, ceil_div(count, kLanes<T>), features, s.q, s.of_k, s.k_by_feature,
                   kChunk, s.scores, kChunk);
  }

  // The first head of a task, and how many it has.
  int64_t first_head(int64_t task) const {
    const int64_t part = task % parts_, g = task / parts_ % call_.key_heads;
    return g * heads_per_key_ + heads_per_key_ * part / parts_;
  }
  int64_t num_heads(int64_t task) const {
    const int64_t part = task % parts_;
    return heads_per_key_ * (part + 1) / parts_ - heads_per_key_ * part / parts_;
  }

  const Call call_;
  const int64_t parts_, heads_per_key_, chunks_;
};

template <typename T>
class LinearAttentionForwardJob : public LinearAttentionJob<LinearAttentionForward<T>> {
 public:
  using Call = LinearAttentionForward<T>;
  using Base = LinearAttentionJob<Call>;
  using Base::call_, Base::chunks_, Base::parts_;

  LinearAttentionForwardJob(const Call& call, int threads)
      : Base(call, threads, Scratch(call, nullptr).bytes()) {}

 private:
  struct Scratch : LinearAttentionScratch<T> {
    using Base = LinearAttentionScratch<T>;
    using Base::Base, Base::take, Base::of_v, Base::of_state, Base::heads;

    T* const weights = take(kChunk * kChunk);
    T* const v = take(kChunk * of_v);
    T* const y = take(kChunk * of_v);
    T* const states = take(heads * of_state);  // (head, feature, value)
  };

  void run_task(int64_t task, void* memory) override {
    const Scratch s(call_, memory);
    const int64_t b = task / parts_ / call_.key_heads, g = task / parts_ % call_.key_heads;
    const int64_t first = this->first_head(task), heads = this->num_heads(task);
    const int64_t features = call_.features, values = call_.values, time = call_.time;
    const int64_t of_k = s.of_k, of_v = s.of_v, of_state = s.of_state;

    for (int64_t n = 0; n < heads; ++n) {
      const int64_t head = (b * call_.heads + first + n) * values * features;
      transpose(call_.state + head, features, values, features, s.states + n * of_state, of_v);
    }
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const int64_t t = chunk * kChunk, count = std::min(kChunk, time - t);
      this->read_chunk(s, b, g, t, count);
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t h = first + n, place = (b * time + t) * call_.heads + h;
        T* const state = s.states + n * of_state;
        if (call_.before != nullptr) {
          T* const kept = call_.before +
                          ((b * chunks_ + chunk) * call_.heads + h) * features * values;
          for (int64_t f = 0; f < features; ++f) {
            std::copy_n(state + f * of_v, values, kept + f * values);
          }
        }
        s.decays.set(call_.log_decay + place, call_.heads, count);
        copy_rows(call_.v + place * values, call_.heads * values, count, values, s.v);
        // y
        set_product<T>(count, of_v / kLanes<T>, features, s.q, of_k, state, of_v, s.y, of_v);
        for (int64_t i = 0; i < count; ++i) {
          scale(s.y + i * of_v, s.decays.from_start[i], of_v);
          multiply(s.scores + i * kChunk, s.decays.between + i * kChunk, s.weights + i * kChunk,
                   count);
        }
        add_product<T>(count, of_v / kLanes<T>, count, s.weights, kChunk, s.v, of_v, s.y, of_v);
        T* const to = call_.y + place * values;
        for (int64_t i = 0; i < count; ++i) {
          std::copy_n(s.y + i * of_v, values, to + i * call_.heads * values);
        }
        // The state after the chunk
        scale(state, s.decays.whole, of_state);
        for (int64_t i = 0; i < count; ++i) scale(s.v + i * of_v, s.decays.to_end[i], of_v);
        add_product<T, true>(features, of_v / kLanes<T>, count, s.k, of_k, s.v, of_v, state,
                             of_v);
      }
    }
    for (int64_t n = 0; n < heads; ++n) {
      const int64_t head = (b * call_.heads + first + n) * values * features;
      transpose_back(s.states + n * of_state, of_v, values, features, call_.last + head, features);
    }
  }
};

template <typename T>
class LinearAttentionBackwardJob : public LinearAttentionJob<LinearAttentionBackward<T>> {
 public:
  using Call = LinearAttentionBackward<T>;
  using Base = LinearAttentionJob<Call>;
  using Base::call_, Base::chunks_, Base::parts_;

  LinearAttentionBackwardJob(const Call& call, int threads)
      : Base(call, threads, Scratch(call, nullptr).bytes(),
             call.parts == 1 ? 0 : call.batch * call.parts * of_row(call) * sizeof(T)) {}

 private:
  struct Scratch : LinearAttentionScratch<T> {
    using Base = LinearAttentionScratch<T>;
    using Base::Base, Base::call, Base::take, Base::of_k, Base::of_v, Base::of_state, Base::heads;

    T* const weights = take(kChunk * kChunk);  // M
    T* const decayed = take(kChunk * kChunk);  // D_ti (∂y_t·v_i)
    T* const dscores = take(kChunk * kChunk);  // their sum over the heads
    T* const dsums = take(kChunk * kChunk);    // of each sum of log decays
    T* const dq = take(kChunk * of_k);
    T* const dk = take(kChunk * of_k);
    T* const dq_by_feature = take(call.features * kChunk);
    T* const dk_by_feature = take(call.features * kChunk);
    T* const v = take(kChunk * of_v);
    T* const dy = take(kChunk * of_v);
    T* const dv = take(kChunk * of_v);
    T* const read = take(kChunk * of_v);
    T* const v_by_value = take(of_v * kChunk);
    T* const dy_by_value = take(of_v * kChunk);
    T* const state = take(of_state);
    T* const dstates = take(heads * of_state);
  };

  void run_task(int64_t task, void* memory) override {
    const Scratch s(call_, memory);
    const int64_t b = task / parts_ / call_.key_heads, g = task / parts_ % call_.key_heads;
    const int64_t first = this->first_head(task), heads = this->num_heads(task);
    const int64_t features = call_.features, values = call_.values, time = call_.time;
    const int64_t of_k = s.of_k, of_v = s.of_v, of_state = s.of_state, columns = of_v / kLanes<T>;

    for (int64_t n = 0; n < heads; ++n) {
      const int64_t head = (b * call_.heads + first + n) * values * features;
      transpose(call_.dlast + head, features, values, features, s.dstates + n * of_state, of_v);
    }
    for (int64_t chunk = chunks_ - 1; chunk >= 0; --chunk) {
      const int64_t t = chunk * kChunk, count = std::min(kChunk, time - t);
      this->read_chunk(s, b, g, t, count);
      const int64_t vectors = ceil_div(count, kLanes<T>);  // of steps
      std::fill_n(s.dscores, count * kChunk, T(0));
      std::fill_n(s.dq_by_feature, features * kChunk, T(0));
      std::fill_n(s.dk_by_feature, features * kChunk, T(0));
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t h = first + n, place = (b * time + t) * call_.heads + h;
        const int64_t distance = call_.heads * values;
        T* const dstate = s.dstates + n * of_state;
        copy_rows(call_.before + ((b * chunks_ + chunk) * call_.heads + h) * features * values,
                  values, features, values, s.state);
        s.decays.set(call_.log_decay + place, call_.heads, count);
        copy_rows(call_.v + place * values, distance, count, values, s.v);
        copy_rows(call_.dy + place * values, distance, count, values, s.dy);
        transpose(call_.v + place * values, distance, count, values, s.v_by_value, kChunk);

        // The products of all pairs of steps
        set_product<T>(count, vectors, values, s.dy, of_v, s.v_by_value, kChunk, s.decayed, kChunk);
        for (int64_t i = 0; i < count; ++i) {
          T* const row = s.decayed + i * kChunk;
          multiply(s.scores + i * kChunk, s.decays.between + i * kChunk, s.weights + i * kChunk,
                   count);
          multiply(row, s.decays.between + i * kChunk, row, count);
          multiply(row, s.scores + i * kChunk, s.dsums + i * kChunk, count);
          add(row, s.dscores + i * kChunk, count);
        }
        // ∂v_i = f_i ∂S k_i + Σ_t M_ti ∂y_t
        T of_start[kChunk], of_end[kChunk], of_whole = 0;
        set_product<T>(count, columns, features, s.k, of_k, dstate, of_v, s.dv, of_v);
        for (int64_t i = 0; i < count; ++i) {
          scale(s.dv + i * of_v, s.decays.to_end[i], of_v);
          of_end[i] = dot(s.dv + i * of_v, s.v + i * of_v, of_v);
        }
        add_product<T, true>(count, columns, count, s.weights, kChunk, s.dy, of_v, s.dv, of_v);
        for (int64_t i = 0; i < count; ++i) {
          std::copy_n(s.dv + i * of_v, values, call_.dv + place * values + i * distance);
        }
        // e_t ∂y_t reads the state before the chunk.
        set_product<T>(count, columns, features, s.q, of_k, s.state, of_v, s.read, of_v);
        for (int64_t i = 0; i < count; ++i) {
          scale(s.dy + i * of_v, s.decays.from_start[i], of_v);
          of_start[i] = dot(s.dy + i * of_v, s.read + i * of_v, of_v);
          // f_i v_i is written to the state after the chunk.
          for (int64_t f = 0; f < values; ++f) {
            s.dy_by_value[f * kChunk + i] = s.dy[i * of_v + f];
            s.v_by_value[f * kChunk + i] *= s.decays.to_end[i];
          }
        }
        add_product<T>(features, vectors, values, s.state, of_v, s.dy_by_value, kChunk,
                       s.dq_by_feature, kChunk);
        add_product<T>(features, vectors, values, dstate, of_v, s.v_by_value, kChunk,
                       s.dk_by_feature, kChunk);
        // ∂S before the chunk
        scale(dstate, s.decays.whole, of_state);
        of_whole = dot(dstate, s.state, of_state);
        add_product<T, true>(features, columns, count, s.q, of_k, s.dy, of_v, dstate, of_v);
        set_dlog(s.dsums, of_start, of_end, of_whole, count, call_.dlog_decay + place, call_.heads);
      }
      // What all heads of the task add to ∂q and ∂k
      set_product<T>(count, of_k / kLanes<T>, count, s.dscores, kChunk, s.k, of_k, s.dq, of_k);
      std::fill_n(s.dk, count * of_k, T(0));
      add_product<T, true>(count, of_k / kLanes<T>, count, s.dscores, kChunk, s.q, of_k, s.dk,
                           of_k);
      const auto [dq, dk] = of_part(b, task % parts_);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t to = ((t + i) * call_.key_heads + g) * features;
        for (int64_t f = 0; f < features; ++f) {
          dq[to + f] = s.dq[i * of_k + f] + s.dq_by_feature[f * kChunk + i];
          dk[to + f] = s.dk[i * of_k + f] + s.dk_by_feature[f * kChunk + i];
        }
      }
    }
    for (int64_t n = 0; n < heads; ++n) {
      const int64_t head = (b * call_.heads + first + n) * values * features;
      transpose_back(s.dstates + n * of_state, of_v, values, features, call_.dstate + head,
                     features);
    }
  }

  // The numbers of q and k in a row of the batch.
  static int64_t of_row(const Call& call) {
    return 2 * call.time * call.key_heads * call.features;
  }

  // Where a part writes ∂q and ∂k of a row.
  std::array<T*, 2> of_part(int64_t b, int64_t part) const {
    const int64_t size = of_row(call_);
    if (parts_ == 1) return {call_.dq + b * size / 2, call_.dk + b * size / 2};
    T* const start = reinterpret_cast<T*>(this->shared()) + (b * parts_ + part) * size;
    return {start, start + size / 2};
  }

  // Adds up what the parts of a row have written for a key head.
  void finish_group(int64_t group) override {
    const int64_t b = group / call_.key_heads, g = group % call_.key_heads;
    const int64_t features = call_.features, distance = call_.key_heads * features;
    T* const sums[] = {call_.dq + b * call_.time * distance, call_.dk + b * call_.time * distance};
    for (int i = 0; i < 2; ++i) {
      for (int64_t t = 0; t < call_.time; ++t) {
        const int64_t at = t * distance + g * features;
        std::fill_n(sums[i] + at, features, T(0));
        for (int64_t part = 0; part < parts_; ++part) {
          const T* const from = of_part(b, part)[i];
          for (int64_t f = at; f < at + features; ++f) sums[i][f] += from[f];
        }
      }
    }
  }

  // The log decay of step s is in the sums of the pairs i < s ≤ t, of e_t for t ≥ s, of f_i for
  // i < s, and of Π.
  static void set_dlog(const T* dsums, const T* of_start, const T* of_end, T of_whole,
                       int64_t count, T* dlog, int64_t distance) {
    T later[kChunk] = {}, of_starts = 0;
    for (int64_t s = count - 1; s >= 0; --s) {
      add(dsums + s * kChunk, later, count);
      of_starts += of_start[s];
      T sum = of_starts + of_whole;
      for (int64_t i = 0; i < s; ++i) sum += later[i] + of_end[i];
      dlog[s * distance] = sum;
    }
  }
};

}  // namespace twinscan::TWINSCAN_ISA
