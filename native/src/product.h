// Products of rows of numbers with packed weights.
#pragma once

#include "vector.h"

namespace twinscan::TWINSCAN_ISA {

// The weights of V vectors of outputs lie in a panel: for each k, V vectors with the weights of
// input k. A product keeps V·R sums in registers, for R rows at once.
constexpr int kMostVectors = 4;

constexpr int most_rows(int vectors) {
  const int sums = (kRegisters == 32 ? 24 : 12) / vectors;
  return sums < 8 ? sums : 8;
}

// Each addition waits for the previous one to the same register. Few sums are therefore split into
// several partial sums each, so that there is always an independent addition.
constexpr int partial_sums(int sums) {
  const int most = (kRegisters == 32 ? 24 : 12) / sums;
  return most >= 4 && sums <= 4 ? 4 : most >= 2 && sums <= 8 ? 2 : 1;
}

// The sums over `kDepth` inputs are added up before they join the total. This keeps rounding errors
// small, and this part of a panel in the first-level cache while it meets all rows.
constexpr int64_t kDepth = 96;

// Large weights do not stay in the second-level cache. For each input, a product therefore fetches
// this many vectors of the part of the panel that comes next, unless it has too few sums to hide that.
constexpr int kFetched = 2;

// totals[r][v] += Σ_k rows[r][k] panel[k][v], while vectors from `next` on are fetched
template <typename T, int V, int R>
__attribute__((noinline)) void add_product(const T* panel, const T* rows, int64_t stride,
                                           int64_t depth, const T* next, Vector<T>* totals) {
  constexpr int P = partial_sums(V * R);
  Vector<T> sums[P][R][V] = {};
  const auto add = [&](int part, int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; V * R >= 12 && i < kFetched; ++i) {
      __builtin_prefetch(next + (k * kFetched + i) * kLanes<T>, 0, 2);
    }
    Vector<T> weights[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) weights[v] = load(panel + (k * V + v) * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[part][r][v] += rows[r * stride + k] * weights[v];
    }
  };
  int64_t k = 0;
  for (; k + P <= depth; k += P) {
#pragma GCC unroll 8
    for (int part = 0; part < P; ++part) add(part, k + part);
  }
  for (; k < depth; ++k) add(0, k);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      Vector<T> sum = sums[0][r][v];
      if constexpr (P == 2) sum += sums[1][r][v];
      if constexpr (P == 4) sum = (sum + sums[1][r][v]) + (sums[2][r][v] + sums[3][r][v]);
      totals[r * V + v] += sum;
    }
  }
}

template <typename T, int V, int R = most_rows(V)>
void add_product(int count, const T* panel, const T* rows, int64_t stride, int64_t depth,
                 const T* next, Vector<T>* totals) {
  if (count == R) {
    add_product<T, V, R>(panel, rows, stride, depth, next, totals);
  } else if constexpr (R > 1) {
    add_product<T, V, R - 1>(count, panel, rows, stride, depth, next, totals);
  }
}

// totals[r][v] += Σ_k rows[r][k] panel[k][v] for the rows that are live. The totals of other rows have
// no meaning afterwards.
template <typename T, int V>
void products(const T* panel, const T* rows, int64_t stride, int64_t depth, int64_t count,
              const bool* live, Vector<T>* totals) {
  const int64_t blocks = ceil_div(count, most_rows(V));
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t part = depth - k < kDepth ? depth - k : kDepth;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = count * block / blocks, last = count * (block + 1) / blocks;
      bool any = false;
      for (int64_t b = first; b < last; ++b) any |= live[b];
      if (!any) continue;
      const T* const next = panel + ((k + part) * V + block * kFetched * part) * kLanes<T>;
      add_product<T, V>(int(last - first), panel + k * V * kLanes<T>, rows + first * stride + k,
                        stride, part, next, totals + first * V);
    }
  }
}

template <typename T>
void products(int vectors, const T* panel, const T* rows, int64_t stride, int64_t depth,
              int64_t count, const bool* live, Vector<T>* totals) {
  static_assert(kMostVectors == 4);
  const auto with = vectors == 4   ? products<T, 4>
                    : vectors == 3 ? products<T, 3>
                    : vectors == 2 ? products<T, 2>
                                   : products<T, 1>;
  with(panel, rows, stride, depth, count, live, totals);
}

}  // namespace twinscan::TWINSCAN_ISA
