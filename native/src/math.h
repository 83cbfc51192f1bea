// σ and tanh of vectors, with errors of about one unit in the last place.
#pragma once

#include "vector.h"

namespace twinscan::TWINSCAN_ISA {

// The numbers of a floating-point type that the exponential function needs.
template <typename T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr float kRound = 0x1.8p23f;  // x + kRound has no bits left for a fraction
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kMost = 87.0f;  // e^x and e^−x are normal numbers
  static constexpr int kMantissaBits = 23, kBias = 127;
  // (e^x − 1 − x) / x², by the Cephes library
  static constexpr float kSeries[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                      4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};

template <>
struct ExpConstants<double> {
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 6.93145751953125e-1, kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kMost = 708.0;
  static constexpr int kMantissaBits = 52, kBias = 1023;
  // The Taylor series: 1/13!, 1/12!, …, 1/2!
  static constexpr double kSeries[] = {
      1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
      1.0 / 5040,       1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2};
};

// e^x as scale·(1 + rest), with a power of two and |rest| < 1/2.
template <typename T>
struct Exp {
  Vector<T> scale, rest;

  Vector<T> value() const { return scale * rest + scale; }
};

// Expects |x| ≤ kMost.
template <typename T>
inline Exp<T> exp_in_range(Vector<T> x) {
  using C = ExpConstants<T>;
  using Integer = typename VectorTypes<T>::Integer;
  const Vector<T> shifted = x * T(1.4426950408889634) + C::kRound;
  const Vector<T> n = shifted - C::kRound;
  const Vector<T> r = (x - n * C::kLn2High) - n * C::kLn2Low;
  Vector<T> series = C::kSeries[0] - Vector<T>{};
  for (int i = 1; i < int(sizeof(C::kSeries) / sizeof(T)); ++i) series = series * r + C::kSeries[i];
  // The low bits of `shifted` are those of the integer n.
  const Integer exponent = ((Integer)shifted << C::kMantissaBits) +
                           (decltype(Integer{}[0] + 0)(C::kBias) << C::kMantissaBits);
  return {(Vector<T>)exponent, series * (r * r) + r};
}

template <typename T>
inline Exp<T> exp(Vector<T> x) {
  constexpr T kMost = ExpConstants<T>::kMost;
  x = x < -kMost ? -kMost - Vector<T>{} : x;
  x = x > kMost ? kMost - Vector<T>{} : x;
  return exp_in_range<T>(x);
}

template <typename T>
inline Vector<T> minus_abs(Vector<T> x) {
  return x > 0 ? -x : x;
}

template <typename T>
inline Vector<T> sigmoid(Vector<T> x) {
  const Exp<T> e = exp<T>(-x);
  return 1 / (1 + e.value());
}

// tanh |x| is 1 − 2e / (1 + e) with e = e^(−2|x|). Below 0.55 that would cancel: there it is
// (1 − e) / (1 + e) in float64, and a polynomial of the Cephes library, with fewer roundings, in
// float32.
template <typename T>
inline Vector<T> tanh(Vector<T> x) {
  const Vector<T> minus = minus_abs<T>(x);
  const Exp<T> e = exp<T>(2 * minus);
  const Vector<T> power = e.value();
  Vector<T> result;  // of −|x|
  if constexpr (sizeof(T) == sizeof(float)) {
    const Vector<T> z = x * x;
    Vector<T> series = z * T(-5.70498872745e-3) + T(2.06390887954e-2);
    series = series * z + T(-5.37397155531e-2);
    series = series * z + T(1.33314422036e-1);
    series = series * z + T(-3.33332819422e-1);
    const Vector<T> large = 2 * power / (1 + power) - 1;
    result = minus < T(-0.55) ? large : series * z * minus + minus;
  } else {
    const Vector<T> small = e.scale * e.rest + (e.scale - 1);
    const auto is_large = minus < T(-0.55);
    const Vector<T> quotient = (is_large ? 2 * power : small) / (1 + power);
    result = is_large ? quotient - 1 : quotient;
  }
  return x > 0 ? -result : result;
}

}  // namespace twinscan::TWINSCAN_ISA
