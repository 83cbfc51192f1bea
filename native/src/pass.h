// What the steps of all cells share, for one vector of units.
#pragma once

#include <initializer_list>

#include "scan.h"

namespace twinscan::TWINSCAN_ISA {

template <typename T, template <typename> class CellOf>
struct ForwardPass {
  using Real = T;
  using Call = Forward<T>;
  using Cell = CellOf<T>;
  static constexpr bool kForward = true;
  static constexpr int kGates = Cell::kGates;

  const Call& call;
  T* states[1] = {};  // c

  // `h` is the row's place in the shared array that the first product reads.
  void start(const Place& at, bool restarts, T* h) {
    const auto load_state = [&](const T* from) {
      return restarts || from == nullptr ? Vector<T>{} : load(from + at.state, at.count);
    };
    store(h, load_state(call.h0));
    store(states[0] + at.padded, load_state(call.c0));
  }

  void step(const Place& at, Row row, const Vector<T>* of_x, const Vector<T>* of_h, const T* now,
            T* next) {
    Vector<T> h = load(now), c = load(states[0] + at.padded);
    if (row.active) {
      Cell::step(call, at, of_x, of_h, h, c);
      store(call.y + at.output, h, at.count);
    } else {
      for (int g = 0; g < kGates && call.gates[at.d] != nullptr; ++g) {
        store(call.gates[at.d] + at.gates + g * call.hidden, Vector<T>{}, at.count);
      }
      for (T* residual : {call.cells[at.d], call.n_h[at.d]}) {
        if (residual != nullptr) store(residual + at.kept, Vector<T>{}, at.count);
      }
      store(call.y + at.output, Vector<T>{}, at.count);
    }
    store(next, row.restarts ? Vector<T>{} : h);
    store(states[0] + at.padded, row.restarts ? Vector<T>{} : c);
  }

  void finish(const Place& at, const Vector<T>*, const T* now) {
    store(call.h + at.state, load(now), at.count);
    if (call.c != nullptr) store(call.c + at.state, load(states[0] + at.padded), at.count);
  }
};

template <typename T, template <typename> class CellOf>
struct BackwardPass {
  using Real = T;
  using Call = Backward<T>;
  using Cell = CellOf<T>;
  static constexpr bool kForward = false;
  static constexpr int kGates = Cell::kGates;

  const Call& call;
  T* states[2] = {};  // the part of ∂h that does not come from the product, and ∂c

  void start(const Place& at, bool, T*) {
    store(states[0] + at.padded, load(call.dh + at.state, at.count));
    store(states[1] + at.padded, call.dc == nullptr ? Vector<T>{} : load(call.dc + at.state, at.count));
  }

  // `next` is where the next product reads the gradient of the first gate.
  void step(const Place& at, Row row, const Vector<T>*, const Vector<T>* sums, const T*, T* next) {
    const int64_t padded = ceil_div(call.hidden, kLanes<T>) * kLanes<T>;
    Vector<T> dh = load(states[0] + at.padded) + *sums, dc = load(states[1] + at.padded);
    Vector<T> dsums[kGates] = {};
    if (row.active) {
      dh += load(call.dy + at.output, at.count);
      Cell::step(call, at, row.restarts, dh, dc, dsums);
    } else {
      for (int g = 0; g < kGates; ++g) {
        store(call.dgates_x[at.d] + at.gates + g * call.hidden, Vector<T>{}, at.count);
      }
      T* const dn_h = call.dn_h[at.d];
      if (dn_h != nullptr) store(dn_h + at.kept, Vector<T>{}, at.count);
    }
    if (row.active && row.restarts) dh = dc = Vector<T>{};
    for (int g = 0; g < kGates; ++g) {
      store(next + g * padded, row.restarts ? Vector<T>{} : dsums[g]);
    }
    store(states[0] + at.padded, dh);
    store(states[1] + at.padded, dc);
  }

  void finish(const Place& at, const Vector<T>* sums, const T*) {
    store(call.dh0 + at.state, load(states[0] + at.padded) + *sums, at.count);
    if (call.dc0 != nullptr) store(call.dc0 + at.state, load(states[1] + at.padded), at.count);
  }
};

// The value before a step: `start` at the first step, and zero where the state restarts. `now`
// points at the value after the step, in an array whose steps lie `distance` numbers apart.
template <typename T>
inline Vector<T> load_earlier(const Place& at, bool restarts, const T* start, const T* now,
                              int64_t distance) {
  if (restarts) return Vector<T>{};
  return load(at.earlier == 0 ? start + at.state : now + at.earlier * distance, at.count);
}

}  // namespace twinscan::TWINSCAN_ISA
