// Vectors of the widest registers of one instruction set, through the compilers' vector extensions.
//
// Headers that include this one are compiled once for each instruction set, with TWINSCAN_ISA as
// their namespace, so that the linker never merges code for different processors.
#pragma once

#include <cstdint>

namespace twinscan::TWINSCAN_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kRegisters = 32;
#else
constexpr int kVectorBytes = 16, kRegisters = 16;
#endif

template <typename T>
struct VectorTypes;

template <>
struct VectorTypes<float> {
  typedef float Real __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Integer __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VectorTypes<double> {
  typedef double Real __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Integer __attribute__((vector_size(kVectorBytes)));
};

template <typename T>
using Vector = typename VectorTypes<T>::Real;

template <typename T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

// The last vector of a row may be incomplete. This is out of line, because the compiler would
// otherwise keep the vectors of all loads in memory.
template <typename T>
__attribute__((noinline, cold)) Vector<T> load_some(const T* from, int64_t count) {
  Vector<T> x = {};
  for (int64_t lane = 0; lane < count; ++lane) x[lane] = from[lane];
  return x;
}

template <typename T>
__attribute__((noinline, cold)) void store_some(T* to, Vector<T> x, int64_t count) {
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = x[lane];
}

template <typename T>
inline Vector<T> load(const T* from) {
  Vector<T> x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}

template <typename T>
inline void store(T* to, Vector<T> x) {
  __builtin_memcpy(to, &x, sizeof(x));
}

// Loads `count` numbers, and zeros in the other lanes.
template <typename T>
inline Vector<T> load(const T* from, int64_t count) {
  return __builtin_expect(count == kLanes<T>, 1) ? load(from) : load_some(from, count);
}

template <typename T>
inline void store(T* to, Vector<T> x, int64_t count) {
  if (__builtin_expect(count == kLanes<T>, 1)) {
    store(to, x);
  } else {
    store_some(to, x, count);
  }
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace twinscan::TWINSCAN_ISA
