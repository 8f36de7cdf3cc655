#pragma once

#include <cstdint>
#include <string_view>

// SIMD through Highway, compiled once per instruction set from one source, chosen when the program runs.
//
// A cpu.cc looks like this (the include order matters):
//
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "src/ops/rms_norm/cpu.cc"
//   #include <hwy/foreach_target.h>
//   #include <hwy/highway.h>
//   ...
//   HWY_BEFORE_NAMESPACE();
//   namespace vivace::HWY_NAMESPACE { namespace { ... } Status rms_norm_rows(...) {...} }
//   HWY_AFTER_NAMESPACE();
//   #if HWY_ONCE
//   namespace vivace { ... VIVACE_SIMD(rms_norm_rows)(args...) ... }
//   #endif
//
// Highway's own dynamic dispatch lives in a shared library that the program would then need; VIVACE_SIMD does
// the same choice without it.

namespace vivace::cpu {

/// The widest instruction set that both the program and this processor have.
enum class Isa { baseline, avx2 };
Isa isa();
std::string_view name_of(Isa isa);

template <class Function>
Function* pick([[maybe_unused]] Function* avx2, Function* baseline) {
  return isa() == Isa::avx2 ? avx2 : baseline;
}

}  // namespace vivace::cpu

#if defined(__x86_64__)
#define VIVACE_SIMD(function) ::vivace::cpu::pick(&N_AVX2::function, &HWY_STATIC_DISPATCH(function))
#else
#define VIVACE_SIMD(function) HWY_STATIC_DISPATCH(function)
#endif
