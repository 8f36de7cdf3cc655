#!/usr/bin/env python3
"""Writes src/device/wgmma.h: one overload per element type, width and source of A. And src/device/wgmma_rows.h: the few with rows of B.

Run   python3 tools/make_wgmma.py > src/device/wgmma.h
      python3 tools/make_wgmma.py rows > src/device/wgmma_rows.h
"""

import sys

TYPES = {"bf16": (16, "bf16.bf16", ", 0, 0", ", 0"), "f16": (16, "f16.f16", ", 0, 0", ", 0"),
         "fp8": (32, "e4m3.e4m3", "", "")}
WIDTHS = [*range(8, 136, 8), 144, 160, 176, 192, 208, 224, 240, 256]
ROWS_WIDTHS = [64, 128, 256]

HEAD = """#pragma once

// Written by tools/make_wgmma.py. Warp-group products of compute capability 9.0a: D[64, N] (+)= A[64, K] B[N, K], fp32
// accumulators, K = 16 for 16-bit elements and 32 for fp8; both operands K-major.
//
//   Wgmma<bf16, 128>::multiply(d, descriptor_a, descriptor_b, accumulate)       A in shared memory
//   Wgmma<bf16, 128>::multiply(d, registers_a, descriptor_b, accumulate)        A in registers
//
// Lane l of warp w holds d[4 i + j]: row 16 w + l / 4 + 8 (j / 2), column 8 i + 2 (l % 4) + j % 2.

#include <cstdint>

#include "src/device/number.h"
#include "src/device/ptx.h"

namespace vivace::device {

/// Orders earlier register accesses before the products that follow.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most `kPending` committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Behind a wait: accumulators are read after this, not before. To the compiler they are ordinary registers.
template <int kCount>
__device__ __forceinline__ void hold_products(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// A K-major operand in shared memory: rows of 128 bytes with the 128-byte swizzle that tensor maps write, 1024-byte
/// aligned groups of 8 rows. Advancing along K inside the 128 bytes adds the byte offset to `p`.
__device__ __forceinline__ uint64_t swizzled_operand(const void* p) {
  return uint64_t{(shared_address(p) & 0x3ffffu) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

template <class T, int kWidth>
struct Wgmma;
"""

ROWS_HEAD = """#pragma once

// Written by tools/make_wgmma.py. Warp-group products of compute capability 9.0a whose second operand is stored by rows:
// D[64, N] (+)= A[64, 16] B[16, N], A in registers. Accumulators as in wgmma.h.

#include "src/device/wgmma.h"

namespace vivace::device {

/// B in shared memory: panels of 64 columns, each of them rows of 128 bytes with the 128-byte swizzle that tensor maps write. Its next
/// 16 rows are 2048 bytes further.
__device__ __forceinline__ uint64_t swizzled_rows_operand(const void* p, uint32_t panel_bytes) {
  return uint64_t{(shared_address(p) & 0x3ffffu) >> 4} | uint64_t{panel_bytes >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

template <class T, int kWidth>
struct WgmmaRows;
"""


def overload(kind, width, from_registers, by_rows=False):
    k, types, tail_shared, tail_registers = TYPES[kind]
    if by_rows:
        tail_registers = ", 1"
    count = width // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if from_registers:
        parameter = "const uint32_t (&a)[4]"
        a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        inputs, after, tail = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])', count + 4, tail_registers
    else:
        parameter, a, inputs, after, tail = "uint64_t a", f"%{count}", '"l"(a)', count + 1, tail_shared
    return f"""  static __device__ __forceinline__ void multiply(float (&d)[{count}], {parameter}, uint64_t b, bool accumulate = true) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after + 1}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{width}k{k}.f32.{types} {{{accumulators}}}, {a}, %{after}, p, 1, 1{tail};\\n}}"
        : {outputs}
        : {inputs}, "l"(b), "r"(static_cast<int>(accumulate)));
  }}"""


def main():
    by_rows = sys.argv[1:] == ["rows"]
    print(ROWS_HEAD if by_rows else HEAD)
    for kind in ["bf16", "f16"] if by_rows else TYPES:
        for width in ROWS_WIDTHS if by_rows else WIDTHS:
            print("template <>")
            print(f"struct {'WgmmaRows' if by_rows else 'Wgmma'}<{kind}, {width}> {{")
            print(f"  static constexpr int kK = {TYPES[kind][0]};")
            if not by_rows:
                print(overload(kind, width, False))
            print(overload(kind, width, True, by_rows))
            print("};")
    print("\n}  // namespace vivace::device")


if __name__ == "__main__":
    main()
