// Operations on rows of numbers. Rows are padded with zeros to whole vectors.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "math.h"
#include "vector.h"

namespace twinscan::TWINSCAN_ISA {

template <typename T>
constexpr int64_t padded(int64_t count) {
  return ceil_div(count, kLanes<T>) * kLanes<T>;
}

// e^x of an x ≤ kMost, and 0 where that is not a normal number
template <typename T>
inline Vector<T> exp_or_zero(Vector<T> x) {
  return x < -ExpConstants<T>::kMost ? Vector<T>{} : exp_in_range<T>(x).value();
}

// e^x of any x: 0 where it is not a normal number, and ∞ from about the largest one on
template <typename T>
inline Vector<T> exp_or_limit(Vector<T> x) {
  const Vector<T> infinity = std::numeric_limits<T>::infinity() - Vector<T>{};
  return x > ExpConstants<T>::kMost ? infinity : exp_or_zero<T>(x);
}

// Combines all lanes, halving their number in each turn.
template <typename T, typename Operation>
inline T reduce(Vector<T> x, Operation combine) {
  T lanes[kLanes<T>];
  store(lanes, x);
#pragma GCC unroll 8
  for (int count = kLanes<T> / 2; count > 0; count /= 2) {
#pragma GCC unroll 8
    for (int lane = 0; lane < count; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + count]);
  }
  return lanes[0];
}

template <typename T>
inline T sum_lanes(Vector<T> x) {
  return reduce<T>(x, [](T a, T b) { return a + b; });
}

template <typename T>
inline void add_pairs(const T* __restrict pairs, int64_t count, T* __restrict sums) {
  for (int64_t i = 0; i < count; ++i) sums[i] = pairs[2 * i] + pairs[2 * i + 1];
}

// Combines the lanes of each of `count` vectors, and overwrites these. `spare` has half their size.
template <typename T>
inline void sum_lanes_of_each(T* vectors, int64_t count, T* spare, T* sums) {
  for (int64_t lanes = kLanes<T> / 2; lanes > 1; lanes /= 2) {
    add_pairs(vectors, count * lanes, spare);
    std::swap(vectors, spare);
  }
  add_pairs(vectors, count, sums);
}

// The rows of a head lie too far apart for the processor to foresee the next ones.
template <typename T>
inline void prefetch(const T* row, int64_t distance, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(row + 8 * distance + i);
}

// Copies rows that lie a distance apart, side by side.
template <typename T>
inline void copy_rows(const T* from, int64_t distance, int64_t rows, int64_t count, T* to) {
  for (int64_t row = 0; row < rows; ++row, from += distance, to += padded<T>(count)) {
    prefetch(from, distance, count);
    std::copy_n(from, count, to);
    std::fill(to + count, to + padded<T>(count), T(0));
  }
}

// to[column][row] = from[row][column]. The last vector of each row of `to` is filled with zeros.
template <typename T>
inline void transpose(const T* from, int64_t distance, int64_t rows, int64_t count, T* to,
                      int64_t to_distance) {
  for (int64_t row = 0; row < padded<T>(rows); ++row) {
    for (int64_t i = 0; i < count; ++i) {
      to[i * to_distance + row] = row < rows ? from[row * distance + i] : T(0);
    }
  }
}

// to[row][column] = from[column][row] for `rows` rows of `count` numbers
template <typename T>
inline void transpose_back(const T* from, int64_t distance, int64_t rows, int64_t count, T* to,
                           int64_t to_distance) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < count; ++i) to[row * to_distance + i] = from[i * distance + row];
  }
}

// The following take whole vectors.
template <typename T>
inline void scale(T* row, T factor, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) store(row + i, factor * load(row + i));
}

template <typename T>
inline void add(const T* a, T* sum, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) store(sum + i, load(sum + i) + load(a + i));
}

template <typename T>
inline void multiply(const T* a, const T* b, T* product, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) store(product + i, load(a + i) * load(b + i));
}

template <typename T>
inline T dot(const T* a, const T* b, int64_t count) {
  Vector<T> sum = {};
  for (int64_t i = 0; i < count; i += kLanes<T>) sum += load(a + i) * load(b + i);
  return sum_lanes<T>(sum);
}

}  // namespace twinscan::TWINSCAN_ISA
