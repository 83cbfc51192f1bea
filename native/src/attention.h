// Attention of each step t to the steps first_t … t:
//
//     p_ts = exp(q_t·k_s / √D − L_t),  L_t = log Σ_s exp(q_t·k_s / √D),  y_t = Σ_s p_ts v_s
//
// The scores of a tile of queries and a tile of keys exist at a time. The forward pass keeps a running
// maximum and sum, and the backward pass computes p again from L:
//
//     ∂s_ts = p_ts (∂y_t·v_s − ∂y_t·y_t),  ∂q_t = Σ_s ∂s_ts k_s / √D,  ∂k_s = Σ_t ∂s_ts q_t / √D,
//     ∂v_s = Σ_t p_ts ∂y_t
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "call.h"
#include "rows.h"
#include "team.h"
#include "tile_product.h"

namespace twinscan::TWINSCAN_ISA {

// The numbers of queries and keys of a tile. The scores of a tile fit into the second-level cache.
constexpr int64_t kQueries = 48;
template <typename T>
constexpr int64_t kKeys = ceil_div(1024 / sizeof(T), kWidth<T>) * kWidth<T>;

template <typename T>
inline bool is_finite(const T* numbers, int64_t count) {
  T zeros[kLanes<T>] = {};  // 0 times a number that is not finite is NaN
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
    for (int lane = 0; lane < kLanes<T>; ++lane) zeros[lane] += 0 * numbers[i + lane];
  }
  for (; i < count; ++i) zeros[0] += 0 * numbers[i];
  T sum = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) sum += zeros[lane];
  return sum == 0;
}

// The keys and values of one head and row of the batch, in the order in which the products read them.
// A number that is not finite makes its key NaN in the forward pass, and so the results of each query
// that sees it. Values of such keys are zero, because a weight of 0 times NaN would be NaN.
template <typename Call>
struct Keys : Arena {
  using T = typename Call::Real;

  Keys(const Call& call, void* memory) : Arena(memory), call(call) {}

  const Call& call;
  const int64_t steps = ceil_div(call.time, kWidth<T>) * kWidth<T>;  // whole panels
  const int64_t of_k = padded<T>(call.features) * steps, of_v = padded<T>(call.values) * steps;
  bool* const finite = take<bool>(call.time);
  // Panels of kWidth steps: (panel, feature, step)
  T* const k_by_feature = take<T>(of_k);
  T* const v_by_feature = take<T>(Call::kForward ? 0 : of_v);
  // (T, padded features)
  T* const k = take<T>(Call::kForward ? 0 : of_k);
  T* const v = take<T>(Call::kForward ? of_v : 0);
};

template <typename T>
void pack_rows(const T* from, int64_t distance, int64_t time, int64_t features, const bool* finite,
               T* rows) {
  for (int64_t t = 0; t < time; ++t, from += distance, rows += padded<T>(features)) {
    const int64_t given = finite[t] ? features : 0;
    std::copy_n(from, given, rows);
    std::fill_n(rows + given, padded<T>(features) - given, T(0));
  }
}

template <typename T>
void pack_columns(const T* from, int64_t distance, int64_t time, int64_t features,
                  const bool* finite, T otherwise, T* panels) {
  for (int64_t start = 0; start < time; start += kWidth<T>, panels += kWidth<T> * features) {
    for (int64_t i = 0; i < kWidth<T>; ++i) {
      const int64_t t = start + i;
      const bool given = t < time && finite[t];
      const T* const row = from + t * distance;
      const T missing = t < time ? otherwise : T(0);
      T* const column = panels + i;
      if (given) {
#pragma GCC unroll 8
        for (int64_t f = 0; f < features; ++f) column[f * kWidth<T>] = row[f];
      } else {
        for (int64_t f = 0; f < features; ++f) column[f * kWidth<T>] = missing;
      }
    }
  }
}

// The number of packs for each thread from which no two threads work on the same pack.
constexpr int64_t kManyPacks = 16;

// What the forward and the backward pass share: packing the keys, and the division over threads.
// A pack holds the keys and values of one head and row of the batch. If there are many packs, a task
// fills a pack and runs all of its parts while the pack is in the cache. Otherwise the first tasks
// fill all packs, and each other task is one part.
template <typename Call>
class AttentionJob : public TaskJob {
 public:
  using T = typename Call::Real;

  // `parts` is the number of parts of each head of q, and `scratch` that of numbers that one needs.
  AttentionJob(const Call& call, int threads, int64_t parts, int64_t scratch)
      : AttentionJob(call, threads, call.heads / call.kv_heads * parts, scratch * sizeof(T),
                     Keys<Call>(call, nullptr).bytes(), packs(call) >= kManyPacks * threads) {}

  // Each thread is worth its waking from about a million multiplications on.
  static double useful_threads(const Call& call) {
    return double(call.batch) * double(call.heads) * double(call.time) * double(call.time) *
           double(call.features + call.values) / 2e6;
  }

 protected:
  // Runs one of the parts of head h of row b of the batch.
  virtual void run_part(int64_t b, int64_t h, int64_t part, const Keys<Call>& keys, T* scratch) = 0;

  const Call call_;

 private:
  AttentionJob(const Call& call, int threads, int64_t parts, size_t scratch, size_t bytes, bool many)
      : TaskJob(packs(call) * (many ? 1 : 1 + parts), threads, (many ? bytes : 0) + scratch,
                many ? 0 : packs(call) * bytes),
        call_(call),
        parts_(parts),
        bytes_(bytes),
        many_(many) {}

  static int64_t packs(const Call& call) { return call.batch * call.kv_heads; }

  void run_task(int64_t task, void* scratch) final {
    if (many_) {
      const Keys<Call> keys(call_, scratch);
      pack(task, keys);
      for (int64_t part = 0; part < parts_; ++part) {
        run(task, part, keys, static_cast<char*>(scratch) + bytes_);
      }
    } else if (task < packs(call_)) {
      pack(task, keys_of(task));
    } else {
      const int64_t part = task - packs(call_);
      wait_for(part / parts_);
      run(part / parts_, part % parts_, keys_of(part / parts_), scratch);
    }
  }

  Keys<Call> keys_of(int64_t index) const { return {call_, shared() + index * bytes_}; }

  void run(int64_t index, int64_t part, const Keys<Call>& keys, void* scratch) {
    const int64_t group = call_.heads / call_.kv_heads;
    const int64_t h = index % call_.kv_heads * group + part % group;
    run_part(index / call_.kv_heads, h, part / group, keys, static_cast<T*>(scratch));
  }

  void pack(int64_t index, const Keys<Call>& keys) {
    const int64_t b = index / call_.kv_heads, h = index % call_.kv_heads, time = call_.time;
    const int64_t of_k = call_.kv_heads * call_.features, of_v = call_.kv_heads * call_.values;
    const T* k = call_.k + b * time * of_k + h * call_.features;
    const T* v = call_.v + b * time * of_v + h * call_.values;
    bool* const finite = keys.finite;
    for (int64_t t = 0; t < time; ++t) {
      prefetch(k + t * of_k, of_k, call_.features);
      prefetch(v + t * of_v, of_v, call_.values);
      finite[t] = is_finite(k + t * of_k, call_.features) && is_finite(v + t * of_v, call_.values);
    }
    const T faulty = Call::kForward ? std::numeric_limits<T>::quiet_NaN() : T(0);
    pack_columns(k, of_k, time, call_.features, finite, faulty, keys.k_by_feature);
    if (Call::kForward) {
      pack_rows(v, of_v, time, call_.values, finite, keys.v);
    } else {
      pack_rows(k, of_k, time, call_.features, finite, keys.k);
      pack_columns(v, of_v, time, call_.values, finite, T(0), keys.v_by_feature);
    }
  }

  const int64_t parts_, bytes_;  // of a pack
  const bool many_;              // whether there are many packs
};

// Which keys the queries of a tile see.
struct Seen {
  int64_t t, count;          // the first query, and how many
  int64_t first, most, end;  // all keys lie in [first, end); all queries see those in [most, t]

  static Seen of(const int32_t* first, int64_t t, int64_t time) {
    Seen seen{t, std::min(kQueries, time - t), time, 0, 0};
    for (int64_t i = 0; i < seen.count; ++i) {
      seen.first = std::min<int64_t>(seen.first, std::max(0, first[t + i]));
      seen.most = std::max<int64_t>(seen.most, first[t + i]);
    }
    seen.end = t + seen.count;
    return seen;
  }

  // Whether some query from t on does not see some key of a tile.
  bool partial(int64_t start, int64_t end, int64_t t) const { return start < most || end > t + 1; }
};

// Replaces the scores of the keys `start`, `start` + 1, … by −∞, except for the keys first … t.
template <typename T>
inline void mask(T* scores, int64_t vectors, int64_t start, int64_t first, int64_t t) {
  const Vector<T> none = -std::numeric_limits<T>::infinity() - Vector<T>{};
  const Vector<T> least = T(first - start) - Vector<T>{}, last = T(t - start) - Vector<T>{};
  Vector<T> key;
  for (int lane = 0; lane < kLanes<T>; ++lane) key[lane] = T(lane);
  for (int64_t v = 0; v < vectors * kLanes<T>; v += kLanes<T>, key += T(kLanes<T>)) {
    const Vector<T> x = load(scores + v);
    const Vector<T> early = key > last ? none : x;
    store(scores + v, key < least ? none : early);
  }
}

template <typename T>
class AttentionForwardJob : public AttentionJob<AttentionForward<T>> {
 public:
  using Call = AttentionForward<T>;
  using Base = AttentionJob<Call>;
  using Base::call_;

  AttentionForwardJob(const Call& call, int threads)
      : Base(call, threads, ceil_div(call.time, kQueries),
             kQueries * (padded<T>(call.features) + padded<T>(call.values)) +
                 kMostRows * kKeys<T>) {}

 private:
  // A part is one tile of queries. The last tiles see the most keys, and come first.
  void run_part(int64_t b, int64_t h, int64_t part, const Keys<Call>& keys, T* scratch) override {
    const int64_t features = call_.features, values = call_.values, time = call_.time;
    const int64_t t = (ceil_div(time, kQueries) - 1 - part) * kQueries;
    const int32_t* const first = call_.first + b * time;
    const Seen seen = Seen::of(first, t, time);
    const int64_t of_k = padded<T>(features), of_v = padded<T>(values);
    T* const q = scratch;
    T* const y = q + kQueries * of_k;
    T* const scores = y + kQueries * of_v;
    T greatest[kQueries], sums[kQueries];

    const T factor = 1 / std::sqrt(T(features));
    for (int64_t i = 0; i < seen.count; ++i) {
      const T* const from = call_.q + ((b * time + t + i) * call_.heads + h) * features;
      prefetch(from, call_.heads * features, features);
      for (int64_t f = 0; f < features; ++f) q[i * of_k + f] = from[f] * factor;
      // The maximum stays finite, so that scores of −∞ have weight 0 even if all are −∞.
      greatest[i] = std::numeric_limits<T>::lowest();
      sums[i] = 0;
    }
    std::fill_n(y, seen.count * of_v, T(0));

    for (int64_t start = seen.first / kWidth<T> * kWidth<T>; start < seen.end; start += kKeys<T>) {
      // The scores of some rows stay in the first-level cache, and end with the last key that they see.
      for (int64_t r = 0; r < seen.count; r += kMostRows) {
        const int64_t rows = std::min<int64_t>(kMostRows, seen.count - r);
        const int64_t end = std::min(start + kKeys<T>, t + r + rows), count = end - start;
        if (count <= 0) continue;
        const int64_t vectors = ceil_div(count, kLanes<T>);
        for (int64_t s = 0; s < count; s += kWidth<T>) {
          set_product<T>(rows, ceil_div(std::min(kWidth<T>, count - s), kLanes<T>), features,
                         q + r * of_k, of_k, keys.k_by_feature + (start + s) * features, kWidth<T>,
                         scores + s, kKeys<T>);
        }
        const bool partial = seen.partial(start, start + vectors * kLanes<T>, t + r);
        for (int64_t i = 0; i < rows; ++i) {
          T* const row = scores + i * kKeys<T>;
          if (partial) mask(row, vectors, start, first[t + r + i], t + r + i);
          const T faded = soften(row, vectors, greatest[r + i], sums[r + i]);
          if (faded != 1) scale(y + (r + i) * of_v, faded, of_v);
        }
        add_product<T>(rows, of_v / kLanes<T>, count, scores, kKeys<T>, keys.v + start * of_v, of_v,
                       y + r * of_v, of_v);
      }
    }

    for (int64_t i = 0; i < seen.count; ++i) {
      T* const to = call_.y + ((b * time + t + i) * call_.heads + h) * values;
      for (int64_t f = 0; f < values; ++f) to[f] = y[i * of_v + f] / sums[i];
      call_.log_sum[(b * call_.heads + h) * time + t + i] = greatest[i] + std::log(sums[i]);
    }
  }

  // Replaces the scores by their weights e^(score − greatest), and adds them to the sum. Returns the
  // factor of the weights before.
  static T soften(T* scores, int64_t vectors, T& greatest, T& sum) {
    Vector<T> most = greatest - Vector<T>{};
    for (int64_t v = 0; v < vectors; ++v) {
      const Vector<T> x = load(scores + v * kLanes<T>);
      most = x > most ? x : most;
    }
    const T before = greatest;
    greatest = reduce<T>(most, [](T a, T b) { return a > b ? a : b; });
    const T faded = greatest == before ? T(1) : std::exp(before - greatest);
    Vector<T> total = {};
    for (int64_t v = 0; v < vectors; ++v) {
      const Vector<T> weight = power<T>(load(scores + v * kLanes<T>) - greatest);
      store(scores + v * kLanes<T>, weight);
      total += weight;
    }
    sum = sum * faded + sum_lanes<T>(total);
    return faded;
  }
};

template <typename T>
class AttentionBackwardJob : public AttentionJob<AttentionBackward<T>> {
 public:
  using Call = AttentionBackward<T>;
  using Base = AttentionJob<Call>;
  using Base::call_;

  AttentionBackwardJob(const Call& call, int threads)
      : Base(call, threads, 1,
             call.time * (2 * padded<T>(call.features) + padded<T>(call.values) + 2) + 64 +
                 kKeys<T> * (2 * kQueries + padded<T>(call.features) + padded<T>(call.values))) {}

 private:
  // A part is all of a head.
  void run_part(int64_t b, int64_t h, int64_t, const Keys<Call>& keys, T* scratch) override {
    const int64_t features = call_.features, values = call_.values, time = call_.time;
    const int32_t* const first = call_.first + b * time;
    const int64_t of_k = padded<T>(features), of_v = padded<T>(values);
    const auto take = [&](int64_t count) {
      T* const start = scratch;
      scratch += count;
      return start;
    };
    T* const q = take(time * of_k);
    T* const dq = take(time * of_k);
    T* const dy = take(time * of_v);
    T* const dk = take(kKeys<T> * of_k);
    T* const dv = take(kKeys<T> * of_v);
    T* const weights = take(kKeys<T> * kQueries);
    T* const dscores = take(kKeys<T> * kQueries);
    T* const log_sum = take(time);
    T* const dweights = take(time);  // ∂y_t·y_t

    const T scale = 1 / std::sqrt(T(features));
    std::fill_n(dq, time * of_k, T(0));
    for (int64_t t = 0; t < time; ++t) {
      const int64_t place = (b * time + t) * call_.heads + h;
      const T* const from = call_.q + place * features;
      const T* const y = call_.y + place * values;
      const T* const gradient = call_.dy + place * values;
      prefetch(from, call_.heads * features, features);
      prefetch(y, call_.heads * values, values);
      prefetch(gradient, call_.heads * values, values);
      log_sum[t] = call_.log_sum[(b * call_.heads + h) * time + t];
      // A step whose results are NaN contributes no gradient: its weights become e^−∞.
      const bool finite = std::isfinite(log_sum[t]);
      if (!finite) log_sum[t] = std::numeric_limits<T>::infinity();
      T product = 0;
      for (int64_t f = 0; f < of_k; ++f) {
        q[t * of_k + f] = finite && f < features ? from[f] * scale : T(0);
      }
      for (int64_t f = 0; f < of_v; ++f) {
        dy[t * of_v + f] = finite && f < values ? gradient[f] : T(0);
        if (finite && f < values) product += y[f] * gradient[f];
      }
      dweights[t] = product;
    }

    for (int64_t start = 0; start < time; start += kKeys<T>) {
      const int64_t end = std::min(start + kKeys<T>, time);
      std::fill_n(dk, (end - start) * of_k, T(0));
      std::fill_n(dv, (end - start) * of_v, T(0));
      for (int64_t t = start / kQueries * kQueries; t < time; t += kQueries) {
        const Seen seen = Seen::of(first, t, time);
        // The keys of this tile that some of the queries see.
        const int64_t from = std::max(start, seen.first / kWidth<T> * kWidth<T>);
        const int64_t count = std::min(end, seen.end) - from;
        if (count <= 0) continue;
        const int64_t vectors = ceil_div(count, kLanes<T>);
        for (int64_t s = 0; s < count; s += kWidth<T>) {
          const int64_t of_panel = ceil_div(std::min(kWidth<T>, count - s), kLanes<T>);
          set_product<T>(seen.count, of_panel, features, q + t * of_k, of_k,
                         keys.k_by_feature + (from + s) * features, kWidth<T>, weights + s, kKeys<T>);
          set_product<T>(seen.count, of_panel, values, dy + t * of_v, of_v,
                         keys.v_by_feature + (from + s) * values, kWidth<T>, dscores + s, kKeys<T>);
        }
        const bool partial = seen.partial(from, from + vectors * kLanes<T>, t);
        for (int64_t i = 0; i < seen.count; ++i) {
          T* const row = weights + i * kKeys<T>;
          T* const drow = dscores + i * kKeys<T>;
          if (partial) mask(row, vectors, from, first[t + i], t + i);
          for (int64_t v = 0; v < vectors * kLanes<T>; v += kLanes<T>) {
            const Vector<T> weight = power<T>(load(row + v) - log_sum[t + i]);
            store(row + v, weight);
            store(drow + v, weight * (load(drow + v) - dweights[t + i]));
          }
        }
        T* const dk_seen = dk + (from - start) * of_k;
        T* const dv_seen = dv + (from - start) * of_v;
        add_product<T, true>(count, of_v / kLanes<T>, seen.count, weights, kKeys<T>, dy + t * of_v,
                             of_v, dv_seen, of_v);
        add_product<T, true>(count, of_k / kLanes<T>, seen.count, dscores, kKeys<T>, q + t * of_k,
                             of_k, dk_seen, of_k);
        add_product<T>(seen.count, of_k / kLanes<T>, count, dscores, kKeys<T>, keys.k + from * of_k,
                       of_k, dq + t * of_k, of_k);
      }
      for (int64_t s = start; s < end; ++s) {
        const int64_t place = (b * time + s) * call_.heads + h;
        std::copy_n(dk + (s - start) * of_k, features, call_.dk + place * features);
        std::copy_n(dv + (s - start) * of_v, values, call_.dv + place * values);
      }
    }
    for (int64_t t = 0; t < time; ++t) {
      T* const to = call_.dq + ((b * time + t) * call_.heads + h) * features;
      for (int64_t f = 0; f < features; ++f) to[f] = scale * dq[t * of_k + f];
    }
  }
};

}  // namespace twinscan::TWINSCAN_ISA
