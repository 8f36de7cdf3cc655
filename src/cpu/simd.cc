#include "src/cpu/simd.h"

namespace vivace::cpu {

Isa isa() {
#if defined(__x86_64__)
  static const Isa chosen = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
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
