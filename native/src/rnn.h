// The simple recurrent network: h_t = tanh(x W_x + b + h_{t−1} W), or max(·, 0) in place of tanh.
#pragma once

#include "math.h"
#include "pass.h"

namespace twinscan::TWINSCAN_ISA {

template <typename T>
struct RnnForward {
  static constexpr int kGates = 1;

  static void step(const Forward<T>& call, const Place&, const Vector<T>* of_x,
                   const Vector<T>* of_h, Vector<T>& h, Vector<T>&) {
    const Vector<T> sum = *of_x + *of_h;
    h = call.relu ? (sum < 0 ? Vector<T>{} : sum) : tanh<T>(sum);
  }
};

template <typename T>
struct RnnBackward {
  static constexpr int kGates = 1;

  static void step(const Backward<T>& call, const Place& at, bool, Vector<T>& dh, Vector<T>&,
                   Vector<T>* dsums) {
    const Vector<T> y = load(call.y + at.output, at.count);
    *dsums = call.relu ? (y > 0 ? dh : Vector<T>{}) : dh * (1 - y * y);
    store(call.dgates_x[at.d] + at.gates, *dsums, at.count);
    dh = Vector<T>{};  // h_{t−1} is in the sum only
  }
};

}  // namespace twinscan::TWINSCAN_ISA
