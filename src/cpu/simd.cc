#include "src/cpu/simd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace vivace::cpu {

Isa isa() {
#if defined(__x86_64__)
  static const Isa chosen = [] {
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;  // clang 14 knows no name for f16c
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2");
    return avx2 ? Isa::avx2 : Isa::baseline;
  }();
  return chosen;
#else
  return Isa::baseline;
#endif
}

std::string_view name_of(Isa isa) {
#if defined(__x86_64__)
  return isa == Isa::avx2 ? "avx2" : "ssse3";
#else
  return isa == Isa::avx2 ? "avx2" : "neon";
#endif
}

}  // namespace vivace::cpu
