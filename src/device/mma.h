#pragma once

// Tensor-core products that every GPU from compute capability 8.0 has: one warp, 16 x 8 x 16, fp32 accumulators.
//
// Fragments of lane l (row = l / 4, pair = l % 4):
//   A [16, 16] row-major   a[0] (row, 2 pair), a[1] (row + 8, 2 pair), a[2] (row, 2 pair + 8), a[3] (row + 8, 2 pair + 8)
//   B [16, 8]  column-wise b[0] (k = 2 pair, n = row), b[1] (k = 2 pair + 8, n = row)
//   C [16, 8]              c[0], c[1] (row, 2 pair and + 1), c[2], c[3] (row + 8, the same)
// Each 32-bit register holds two neighbouring elements.

#include <cuda_runtime.h>

#include <cstdint>

#include "src/device/number.h"
#include "src/device/ptx.h"

namespace vivace::device {

template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma_16x8x16<bf16>(float (&c)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_16x8x16<f16>(float (&c)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  load_matrices(r, shared_address(row));
}
/// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

/// An 8 x 8 matrix of 16-bit elements across the warp, row l / 4 and columns 2 (l % 4) and + 1 in lane l, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

/// Byte offset of 16-byte chunk `chunk` of row `row` in a tile whose rows take `kRowBytes` (128 or a multiple): chunks
/// of a 128-byte line are permuted by the row, so that eight rows read at one chunk hit different banks.
template <int kRowBytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  static_assert(kRowBytes % 128 == 0, "rows are whole 128-byte lines");
  return row * kRowBytes + ((chunk & ~7) | ((chunk ^ row) & 7)) * 16;
}

}  // namespace vivace::device
