// Products of two tiles that are in the cache.
#pragma once

#include "vector.h"

namespace twinscan::TWINSCAN_ISA {

// A block of kMostRows rows and kMostColumns vectors of sums is kept in registers.
constexpr int kMostColumns = kRegisters == 32 ? 4 : 2, kMostRows = 6;
template <typename T>
constexpr int64_t kWidth = kMostColumns * kLanes<T>;

// sums[r][v] (+)= Σ_k a[r, k] b[k][v]. The numbers a[r, k] of a row lie side by side, or, with
// kTransposed, those of a column. Rows lie the given distances apart.
template <typename T, bool kTransposed, bool kAdd, int V, int R>
__attribute__((noinline)) void product_of_block(int64_t depth, const T* a, int64_t a_distance,
                                                const T* b, int64_t b_distance, T* sums,
                                                int64_t distance) {
  Vector<T> block[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      block[r][v] = kAdd ? load(sums + r * distance + v * kLanes<T>) : Vector<T>{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<T> row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) row[v] = load(b + v * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const T factor = kTransposed ? a[r] : a[r * a_distance];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) block[r][v] += factor * row[v];
    }
    a += kTransposed ? a_distance : 1;
    b += b_distance;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sums + r * distance + v * kLanes<T>, block[r][v]);
  }
}

template <typename T, bool kTransposed, bool kAdd, int V, int R = kMostRows, typename... Rest>
void product_of_rows(int64_t rows, Rest... rest) {
  if (rows == R) {
    product_of_block<T, kTransposed, kAdd, V, R>(rest...);
  } else if constexpr (R > 1) {
    product_of_rows<T, kTransposed, kAdd, V, R - 1>(rows, rest...);
  }
}

template <typename T, bool kTransposed, bool kAdd, int V = kMostColumns, typename... Rest>
void product_of_columns(int64_t vectors, int64_t rows, Rest... rest) {
  if (vectors == V) {
    product_of_rows<T, kTransposed, kAdd, V>(rows, rest...);
  } else if constexpr (V > 1) {
    product_of_columns<T, kTransposed, kAdd, V - 1>(vectors, rows, rest...);
  }
}

template <typename T, bool kTransposed, bool kAdd>
void product(int64_t rows, int64_t vectors, int64_t depth, const T* a, int64_t a_distance,
             const T* b, int64_t b_distance, T* sums, int64_t distance) {
  for (int64_t v = 0; v < vectors; v += kMostColumns) {
    const int64_t columns = vectors - v < kMostColumns ? vectors - v : kMostColumns;
    for (int64_t r = 0; r < rows; r += kMostRows) {
      const int64_t some = rows - r < kMostRows ? rows - r : kMostRows;
      product_of_columns<T, kTransposed, kAdd>(
          columns, some, depth, a + r * (kTransposed ? 1 : a_distance), a_distance,
          b + v * kLanes<T>, b_distance, sums + r * distance + v * kLanes<T>, distance);
    }
  }
}

// sums = a b
template <typename T, typename... Rest>
void set_product(int64_t rows, int64_t vectors, Rest... rest) {
  product<T, false, false>(rows, vectors, rest...);
}

// sums += a b, or aᵀ b
template <typename T, bool kTransposed = false, typename... Rest>
void add_product(int64_t rows, int64_t vectors, Rest... rest) {
  product<T, kTransposed, true>(rows, vectors, rest...);
}

}  // namespace twinscan::TWINSCAN_ISA
