// The gated recurrent unit, as torch defines it:
//
//     r, z = σ, σ of x W_x + b + h_{t−1} W
//     n = tanh(x W_xn + b_xn + r (h_{t−1} W_n + b_hn))
//     h_t = (1 − z) n + z h_{t−1}
#pragma once

#include "math.h"
#include "pass.h"

namespace twinscan::TWINSCAN_ISA {

template <typename T>
struct GruForward {
  static constexpr int kGates = 3;

  static void step(const Forward<T>& call, const Place& at, const Vector<T>* of_x,
                   const Vector<T>* of_h, Vector<T>& h, Vector<T>&) {
    const Vector<T> n_h = of_h[2] + load(call.bias_hn + at.d * call.hidden + at.unit, at.count);
    const Vector<T> r = sigmoid<T>(of_x[0] + of_h[0]);
    const Vector<T> z = sigmoid<T>(of_x[1] + of_h[1]);
    const Vector<T> n = tanh<T>(of_x[2] + r * n_h);
    h = n + z * (h - n);
    if (call.gates[at.d] == nullptr) return;
    T* const gates = call.gates[at.d] + at.gates;
    store(gates, r, at.count);
    store(gates + call.hidden, z, at.count);
    store(gates + 2 * call.hidden, n, at.count);
    store(call.n_h[at.d] + at.kept, n_h, at.count);
  }
};

template <typename T>
struct GruBackward {
  static constexpr int kGates = 3;

  static void step(const Backward<T>& call, const Place& at, bool restarts, Vector<T>& dh,
                   Vector<T>&, Vector<T>* dsums) {
    const T* const gates = call.gates[at.d] + at.gates;
    const auto gate = [&](int g) { return load(gates + g * call.hidden, at.count); };
    const Vector<T> r = gate(0), z = gate(1), n = gate(2);
    const Vector<T> n_h = load(call.n_h[at.d] + at.kept, at.count);
    const Vector<T> h_earlier = load_earlier(at, restarts, call.h0, call.y + at.output,
                                             call.directions * call.hidden);
    const Vector<T> dn = dh * (1 - z) * (1 - n * n);
    dsums[0] = dn * n_h * (r * (1 - r));
    dsums[1] = dh * (h_earlier - n) * (z * (1 - z));
    dsums[2] = dn * r;  // the gradient of h_{t−1} W_n + b_hn, while that of x W_xn + b_xn is dn
    T* const dgates = call.dgates_x[at.d] + at.gates;
    store(dgates, dsums[0], at.count);
    store(dgates + call.hidden, dsums[1], at.count);
    store(dgates + 2 * call.hidden, dn, at.count);
    store(call.dn_h[at.d] + at.kept, dsums[2], at.count);
    dh *= z;
  }
};

}  // namespace twinscan::TWINSCAN_ISA
