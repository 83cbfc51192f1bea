// The weights, rearranged once per call in the order in which the products read them.
#pragma once

#include "call.h"
#include "vector.h"

namespace twinscan::TWINSCAN_ISA {

// W_ih or W_hh for the forward pass: some vectors of units of each gate.
//     panel[k][v·gates + g][lane] = W[k, g·H + unit], unit = (block + v)·lanes + lane
template <typename T>
void pack(const T* kernel, int64_t depth, int64_t hidden, int gates, int64_t block, int blocks,
          T* panel) {
  constexpr int lanes = kLanes<T>;
  const int64_t stride = gates * hidden;
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t v = block; v < block + blocks; ++v) {
      for (int g = 0; g < gates; ++g, panel += lanes) {
        const int64_t unit = v * lanes, left = hidden - unit;
        const T* const from = kernel + k * stride + g * hidden + unit;
        // The rows lie too far apart for the processor to foresee the next ones.
        __builtin_prefetch(from + 16 * stride);
        store(panel, load(from, left < lanes ? left : lanes));
      }
    }
  }
}

// W_hh, transposed, for the backward pass. The sums run over all gates of all units, and each gate
// is padded to whole vectors.
//     panel[g·padded + k][v][lane] = W[unit, g·H + k], unit = (block + v)·lanes + lane
template <typename T>
void pack_transposed(const T* kernel, int64_t hidden, int gates, int64_t block, int blocks,
                     T* panel) {
  constexpr int lanes = kLanes<T>;
  const int64_t padded = ceil_div(hidden, lanes) * lanes;
  for (int64_t column = 0; column < gates * padded; column += lanes) {
    const int64_t gate = column / padded, first = column % padded, left = hidden - first;
    for (int unit = 0; unit < blocks * lanes; ++unit) {
      const int64_t row = block * lanes + unit;
      Vector<T> weights = {};
      if (row < hidden) {
        weights = load(kernel + (row * gates + gate) * hidden + first, left < lanes ? left : lanes);
      }
      for (int k = 0; k < lanes; ++k) panel[(column + k) * blocks * lanes + unit] = weights[k];
    }
  }
}

}  // namespace twinscan::TWINSCAN_ISA
