#pragma once

// The arithmetic of the sm90.* kernel, of one warp: S^T = K Q^T, weights, O^T += V^T P^T.
//
// Keys, then dimensions, lie along M of m16n8k16, query rows along N. Fragments are named by lane = 4 q + t. A lane that has
// scores of a query has outputs of the same query, so maxima and sums need no shared memory; weights are turned into the next
// operand by movmatrix. fp8 is widened to f16, which is exact: Hopper has no mma.sync of its own for it.
//
// The bits of a row follow from its query, its keys and where its piece begins and ends: boxes of keys have a maximum per row,
// sums run over 16 keys at a time in their order. Rows beside it, padded ones too, do not appear in them.

#include "src/ops/attention_decode/sm90_shape.cuh"

namespace vivace::attention_sm90 {

/// Four e4m3 as f16, the lower two and the upper two. Halves are named, since a shift would be an instruction.
struct Widened {
  uint32_t low, high;

  __device__ __forceinline__ explicit Widened(uint32_t four) {
    asm("{\n\t"
        ".reg .b16 low, high;\n\t"
        "mov.b32 {low, high}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n\t"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(four));
  }
};

/// A warp's query rows as operands. bf16: register 2 i + h of step i has dimensions 16 i + 8 h + 2 t and + 1 of row q; with an
/// fp8 cache 16 i + 4 t + 2 h and + 1, which is how K's bytes arrive.
template <class T>
struct Queries {
  uint32_t operand[T::kBlocks][T::kHeadSteps][2];
  float factor[T::kBlocks][2];  ///< on products of rows 2 t and 2 t + 1

  __device__ __forceinline__ void load(const Sm90Params& p, const Segment& segment, int row0) {
    const Params& a = p.attention;
    const int lane = static_cast<int>(threadIdx.x) % 32, q = lane / 4, t = lane % 4;
    const float k_scale = a.k_scale != nullptr && !a.scaled_keys ? *a.k_scale : 1.f;
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
      const int r = row0 + 8 * b + q, token = token_of_row(p, r),
                head = segment.head_kv * a.group + r - token * a.group;
      const bool exists = token < segment.rows;
      const int64_t row = segment.row_begin + (exists ? token : 0);
      const int64_t at = row * a.q_stride[0] + (exists ? head : 0) * a.q_stride[1];
      // Used behind the loads of the row, so that they are on their way together.
      const float q_scale = a.q_scale != nullptr && exists
                                ? a.q_scale[row * a.q_scale_stride[0] + head * a.q_scale_stride[1]]
                                : 1.f;
      float power = 1.f;  // that undoes the one of load_as_f16
      if (!T::kFp8 && a.q_type == DType::fp8_e4m3) {
        const auto* from = reinterpret_cast<const uint16_t*>(static_cast<const fp8*>(a.q) + at) + t;
#pragma unroll
        for (int i = 0; i < T::kHeadSteps; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint32_t pair = Widened(exists ? from[8 * i + 4 * h] : 0).low;
            const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pair));
            operand[b][i][h] = device::pack<bf16>(v.x, v.y);
          }
        }
      } else if constexpr (!T::kFp8) {
        const auto* from = reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(a.q) + at) + t;
#pragma unroll
        for (int i = 0; i < T::kHeadSteps; ++i) {
          operand[b][i][0] = exists ? from[8 * i] : 0;
          operand[b][i][1] = exists ? from[8 * i + 4] : 0;
        }
      } else if (a.q_type == DType::fp8_e4m3) {
        const auto* from = reinterpret_cast<const uint32_t*>(static_cast<const fp8*>(a.q) + at) + t;
#pragma unroll
        for (int i = 0; i < T::kHeadSteps; ++i) {
          const uint32_t four = exists ? from[4 * i] : 0;
          const Widened wide(four);
          operand[b][i][0] = wide.low;
          operand[b][i][1] = wide.high;
        }
      } else {
        power = load_as_f16(static_cast<const bf16*>(a.q) + at, exists, operand[b]);
      }
      const float factor = a.factor * k_scale * q_scale * power;
      this->factor[b][0] = __shfl_sync(kAllLanes, factor, 8 * t);
      this->factor[b][1] = __shfl_sync(kAllLanes, factor, 8 * t + 4);
    }
  }

 private:
  /// A row of bf16, each times a power of two that brings its largest to [2^14, 2^15): all eight bits of what is within 2^28 of
  /// that stay. Returns the inverse of that power.
  __device__ __forceinline__ static float load_as_f16(const bf16* row, bool exists,
                                                      uint32_t (&to)[T::kHeadSteps][2]) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    const auto* from = reinterpret_cast<const uint32_t*>(row);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < T::kHeadSteps; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        to[i][h] = exists ? from[8 * i + 2 * t + h] : 0;
        most = max(most, max(to[i][h] & 0x7fffu, to[i][h] >> 16 & 0x7fffu));
      }
    }
    most = max(most, __shfl_xor_sync(kAllLanes, most, 1));
    most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
    // Exponents of fp32; a row of zeros, or one with an infinity, stays as it is.
    const int exponent = static_cast<int>(most >> 7);
    const int shift = exponent == 0 || exponent == 255 ? 0 : min(max(127 + 14 - exponent, -126), 126);
    const float up = __int_as_float((127 + shift) << 23);
#pragma unroll
    for (int i = 0; i < T::kHeadSteps; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = __uint_as_float(to[i][h] << 16), high = __uint_as_float(to[i][h] & 0xffff0000u);
        to[i][h] = device::pack<f16>(low * up, high * up);
      }
    }
    return __int_as_float((127 - shift) << 23);
  }
};

/// Scores of a box: element e of step i and block b is key 16 i + q + 8 (e / 2), row 8 b + 2 t + e % 2.
template <class T>
struct Scores {
  float s[T::kKeySteps][T::kBlocks][4];

  /// Calls body(step, block, element, score) for all of them.
  template <class Body>
  __device__ __forceinline__ void for_each(Body&& body) {
#pragma unroll
    for (int i = 0; i < T::kKeySteps; ++i) {
#pragma unroll
      for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) body(i, b, e, s[i][b][e]);
      }
    }
  }

  __device__ __forceinline__ void multiply(const char* box, const Queries<T>& queries) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for_each([](int, int, int, float& score) { score = 0.f; });
    // Operands of a few loads are on their way together.
    constexpr int kStepsPerLoad = T::kFp8 ? 2 : 1, kLoads = T::kHeadSteps / kStepsPerLoad * T::kKeySteps;
    constexpr int kAhead = 4;
#pragma unroll
    for (int first = 0; first < kLoads; first += kAhead) {
      uint32_t k[kAhead][4];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = (first + a) % T::kKeySteps, j = (first + a) / T::kKeySteps;
        device::load_matrices(k[a], box + T::place(16 * i + lane % 16, 2 * j + lane / 16));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int i = (first + a) % T::kKeySteps, j = (first + a) / T::kKeySteps;
        if constexpr (T::kFp8) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const Widened first_keys(k[a][2 * half]), last_keys(k[a][2 * half + 1]);
            const uint32_t wide[4] = {first_keys.low, last_keys.low, first_keys.high, last_keys.high};
#pragma unroll
            for (int b = 0; b < T::kBlocks; ++b)
              device::mma_16x8x16<f16>(s[i][b], wide, queries.operand[b][2 * j + half]);
          }
        } else {
#pragma unroll
          for (int b = 0; b < T::kBlocks; ++b)
            device::mma_16x8x16<bf16>(s[i][b], k[a], queries.operand[b][j]);
        }
      }
    }
  }
};

/// What the rows of a warp have added up: maxima of scores in units of log2, weights 2^(s - base of the maximum), weighted values.
/// Element e of step i and block b is row 8 b + 2 t + e % 2, dimension 16 i + q + 8 (e / 2), with an fp8 cache 16 i + 2 q + e / 2.
///
/// f16 weights lie up to 2^15 above one: there those 2^-39 below the largest are not yet zero, as they would be at 2^-25 below one.
template <class T>
struct Sums {
  float maximum[T::kBlocks][2], weight[T::kBlocks][2];
  float value[T::kHeadSteps][T::kBlocks][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
      maximum[b][0] = maximum[b][1] = kNoKeys;
      weight[b][0] = weight[b][1] = 0.f;
#pragma unroll
      for (int i = 0; i < T::kHeadSteps; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) value[i][b][e] = 0.f;
      }
    }
  }

  /// Scores become weights, and the sums are brought to their new maxima.
  __device__ __forceinline__ void weigh(Scores<T>& scores) {
    float scale[T::kBlocks][2];
    bool same = true;
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float most = maximum[b][c];
#pragma unroll
        for (int i = 0; i < T::kKeySteps; ++i)
          most = fmaxf(most, fmaxf(scores.s[i][b][c], scores.s[i][b][c + 2]));
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 4));
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 8));
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 16));
        // Without a score above -infinity the weights are 0, or NaN for a NaN; -infinity - -infinity would be NaN for both.
        const float base = most == kNoKeys ? 0.f : base_of(most);
        scale[b][c] = exp2_of(__fsub_rn(base_of(maximum[b][c]), base));
        maximum[b][c] = most;
        same = same && scale[b][c] == 1.f;
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < T::kKeySteps; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& s = scores.s[i][b][c + 2 * h];
            s = exp2_of(__fsub_rn(s, base));
            total = __fadd_rn(total, s);
          }
        }
        weight[b][c] = __fmaf_rn(weight[b][c], scale[b][c], total);
      }
    }
    if (__all_sync(kAllLanes, same)) return;  // a factor of 1 changes nothing
#pragma unroll
    for (int i = 0; i < T::kHeadSteps; ++i) {
#pragma unroll
      for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) value[i][b][e] = __fmul_rn(value[i][b][e], scale[b][e % 2]);
      }
    }
  }

  /// value += weights . V. `visible(key)` is asked of keys of the box when kMasked: what it refuses counts as zero, whatever its
  /// bits; only rows of which takes(b, c) holds change then.
  template <bool kMasked, class Visible, class Takes>
  __device__ __forceinline__ void add(const char* box, const Scores<T>& weights, Visible&& visible,
                                      Takes&& takes) {
    const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
#pragma unroll
    for (int i = 0; i < T::kKeySteps; ++i) {
      uint32_t p[T::kBlocks][2];
#pragma unroll
      for (int b = 0; b < T::kBlocks; ++b) {
        const float* s = weights.s[i][b];
        p[b][0] = device::transposed(device::pack<typename T::Operand>(s[0], s[1]));
        p[b][1] = device::transposed(device::pack<typename T::Operand>(s[2], s[3]));
      }
      uint32_t keep[2] = {kAllLanes, kAllLanes};
      if constexpr (kMasked) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = 16 * i + 8 * h + 2 * t;
          keep[h] = (visible(key) ? 0xffffu : 0u) | (visible(key + 1) ? 0xffff0000u : 0u);
        }
      }
      constexpr int kStepsPerLoad = T::kFp8 ? 2 : 1, kLoads = T::kHeadSteps / kStepsPerLoad;
      constexpr int kAhead = kMasked ? 1 : kLoads < 4 ? kLoads : 4;
#pragma unroll
      for (int first = 0; first < kLoads; first += kAhead) {
        uint32_t loaded[kAhead][4];
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
          device::load_matrices_transposed(
              loaded[a], box + T::place(16 * i + lane / 16 * 8 + lane % 8, 2 * (first + a) + lane / 8 % 2));
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const uint32_t(&v)[4] = loaded[a];
          const int j = (first + a) * kStepsPerLoad;
          if constexpr (T::kFp8) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              // Bytes are (key, dimension) 00 01 10 11; pairs of keys are what an operand takes.
              const Widened first_keys(__byte_perm(v[half], 0, 0x3120)),
                  last_keys(__byte_perm(v[2 + half], 0, 0x3120));
              const uint32_t wide[4] = {first_keys.low & keep[0], first_keys.high & keep[0],
                                        last_keys.low & keep[1], last_keys.high & keep[1]};
              add_step<kMasked>(value[j + half], wide, p, takes);
            }
          } else {
            const uint32_t kept[4] = {v[0] & keep[0], v[1] & keep[0], v[2] & keep[1], v[3] & keep[1]};
            add_step<kMasked>(value[j], kept, p, takes);
          }
        }
      }
    }
  }

  /// What weights are measured from.
  __device__ __forceinline__ static float base_of(float maximum) {
    return T::kFp8 ? __fsub_rn(maximum, 15.f) : maximum;
  }

  /// At the end: weights of all keys, in every lane of a row, and the maximum becomes what they are measured from.
  __device__ __forceinline__ void total_weights() {
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          weight[b][c] = __fadd_rn(weight[b][c], __shfl_xor_sync(kAllLanes, weight[b][c], step));
        maximum[b][c] = base_of(maximum[b][c]);
      }
    }
  }

  /// Calls body(b, c) for the rows of a lane, 8 b + 2 t + c.
  template <class Body>
  __device__ __forceinline__ static void for_each_row(Body&& body) {
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < 2; ++c) body(b, c);
    }
  }
  /// The dimension of the first of two values that lane 4 q + t has of a row and a step. The other one is the next with kFp8, else the
  /// eighth behind it.
  __device__ __forceinline__ static int dimension(int step, int q) {
    return 16 * step + (T::kFp8 ? 2 * q : q);
  }
  /// Calls body(dimension, first value, second) for the pairs of a row.
  template <class Body>
  __device__ __forceinline__ void for_each_pair(int b, int c, Body&& body) const {
    const int q = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int i = 0; i < T::kHeadSteps; ++i) body(dimension(i, q), value[i][b][c], value[i][b][c + 2]);
  }

  /// The same values four at a time: chunk k of a row has those of steps 2 k and 2 k + 1.
  static constexpr int kChunks = T::kHeadSteps / 2;
  template <class Body>
  __device__ __forceinline__ static void for_each_chunk(Body&& body) {
    for_each_row([&](int b, int c) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) body(b, c, k);
    });
  }
  __device__ __forceinline__ float4 chunk(int b, int c, int k) const {
    const float(&v0)[4] = value[2 * k][b], (&v1)[4] = value[2 * k + 1][b];
    return {v0[c], v0[c + 2], v1[c], v1[c + 2]};
  }
  __device__ __forceinline__ void set_chunk(int b, int c, int k, const float4& chunk) {
    float(&v0)[4] = value[2 * k][b], (&v1)[4] = value[2 * k + 1][b];
    v0[c] = chunk.x;
    v0[c + 2] = chunk.y;
    v1[c] = chunk.z;
    v1[c + 2] = chunk.w;
  }

 private:
  template <bool kMasked, class Takes>
  __device__ __forceinline__ static void add_step(float (&sum)[T::kBlocks][4], const uint32_t (&a)[4],
                                                  const uint32_t (&p)[T::kBlocks][2], Takes&& takes) {
#pragma unroll
    for (int b = 0; b < T::kBlocks; ++b) {
      if constexpr (kMasked) {
        float taken[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) taken[e] = sum[b][e];
        device::mma_16x8x16<typename T::Operand>(taken, a, p[b]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (takes(b, e % 2)) sum[b][e] = taken[e];
        }
      } else {
        device::mma_16x8x16<typename T::Operand>(sum[b], a, p[b]);
      }
    }
  }
};

}  // namespace vivace::attention_sm90
