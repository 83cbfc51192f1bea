// Chooses the kernels for the processor at run time.
#include <cstdlib>
#include <cstring>

#include "call.h"

namespace twinscan {

#define TWINSCAN_DECLARE(isa)                    \
  namespace isa {                                \
  extern const Kernels<float> kernels_float32;   \
  extern const Kernels<double> kernels_float64;  \
  }

TWINSCAN_DECLARE(baseline)
#if defined(__x86_64__)
TWINSCAN_DECLARE(avx2)
TWINSCAN_DECLARE(avx512)
#endif

// Whether this instruction set may be used. The environment variable TWINSCAN_WITHOUT names those
// that may not, so that tests can run the kernels for older processors.
[[maybe_unused]] static bool allowed(const char* isa) {
  static const char* const without = std::getenv("TWINSCAN_WITHOUT");
  return without == nullptr || std::strstr(without, isa) == nullptr;
}

template <typename T>
static const Kernels<T>& choose(const Kernels<T>& baseline, [[maybe_unused]] const Kernels<T>& avx2,
                                [[maybe_unused]] const Kernels<T>& avx512) {
#if defined(__x86_64__)
  if (allowed("avx512") && __builtin_cpu_supports("avx512f")) return avx512;
  if (allowed("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2;
#endif
  return baseline;
}

#if !defined(__x86_64__)
namespace avx2 = baseline;
namespace avx512 = baseline;
#endif

template <>
const Kernels<float>& kernels() {
  return choose(baseline::kernels_float32, avx2::kernels_float32, avx512::kernels_float32);
}

template <>
const Kernels<double>& kernels() {
  return choose(baseline::kernels_float64, avx2::kernels_float64, avx512::kernels_float64);
}

}  // namespace twinscan

// Tests ask which kernels they run.
extern "C" __attribute__((visibility("default"))) const char* twinscan_isa() {
  return twinscan::kernels<float>().isa;
}
