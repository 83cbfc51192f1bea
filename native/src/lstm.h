// The long short-term memory:
//
//     i, f, g, o = σ, σ, tanh, σ of x W_x + b + h_{t−1} W
//     c_t = f c_{t−1} + i g
//     h_t = o tanh(c_t)
#pragma once

#include "math.h"
#include "pass.h"

namespace twinscan::TWINSCAN_ISA {

template <typename T>
struct LstmForward {
  static constexpr int kGates = 4;

  static void step(const Forward<T>& call, const Place& at, const Vector<T>* of_x,
                   const Vector<T>* of_h, Vector<T>& h, Vector<T>& c) {
    const auto sum = [&](int gate) { return of_x[gate] + of_h[gate]; };
    const Vector<T> i = sigmoid<T>(sum(0)), f = sigmoid<T>(sum(1));
    const Vector<T> g = tanh<T>(sum(2)), o = sigmoid<T>(sum(3));
    c = f * c + i * g;
    h = o * tanh<T>(c);
    if (call.gates[at.d] == nullptr) return;
    T* const gates = call.gates[at.d] + at.gates;
    store(gates, i, at.count);
    store(gates + call.hidden, f, at.count);
    store(gates + 2 * call.hidden, g, at.count);
    store(gates + 3 * call.hidden, o, at.count);
    store(call.cells[at.d] + at.kept, c, at.count);
  }
};

template <typename T>
struct LstmBackward {
  static constexpr int kGates = 4;

  static void step(const Backward<T>& call, const Place& at, bool restarts, Vector<T>& dh,
                   Vector<T>& dc, Vector<T>* dsums) {
    const T* const gates = call.gates[at.d] + at.gates;
    const auto gate = [&](int g) { return load(gates + g * call.hidden, at.count); };
    const Vector<T> i = gate(0), f = gate(1), g = gate(2), o = gate(3);
    const T* const cell = call.cells[at.d] + at.kept;
    const Vector<T> c_earlier = load_earlier(at, restarts, call.c0, cell, call.hidden);
    const Vector<T> tanh_c = tanh<T>(load(cell, at.count));
    dc += dh * o * (1 - tanh_c * tanh_c);
    dsums[0] = dc * g * (i * (1 - i));
    dsums[1] = dc * c_earlier * (f * (1 - f));
    dsums[2] = dc * i * (1 - g * g);
    dsums[3] = dh * tanh_c * (o * (1 - o));
    for (int k = 0; k < kGates; ++k) {
      store(call.dgates_x[at.d] + at.gates + k * call.hidden, dsums[k], at.count);
    }
    dc *= f;
    dh = Vector<T>{};  // h_{t−1} is in the sums only
  }
};

}  // namespace twinscan::TWINSCAN_ISA
