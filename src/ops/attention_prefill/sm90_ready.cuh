#pragma once

// What two helping warps do to boxes in shared memory before they are multiplied: values that not all rows of a tile see are looked
// at, and fp8 is widened.

#include "src/ops/attention_prefill/sm90_feed.cuh"

namespace vivace::prefill_sm90 {

__device__ __forceinline__ int lane() {
  return static_cast<int>(threadIdx.x) % 32;
}

/// By a helper, of its keys: a V that some rows of its tile do not see in full. A weight of zero does not keep a NaN away, 0 x NaN
/// is NaN: what is not finite becomes zero, and marks say which keys had it for the rows that see them.
template <class T>
class Check {
 public:
  __device__ __forceinline__ Check(Shared<T>& shared, int helper) : s_(shared), helper_(helper) {}

  __device__ __forceinline__ void run(int stage, const Checked& checked) {
    if (checked.from >= checked.to) return;
    Marks<T>& marks = s_.marks[stage][helper_];
    bool& marked = s_.marked[stage][helper_];
    if (marked) clear(marks);
    bool found = false;
    constexpr int kBytes = T::kHelperKeys * 128, kAtOnce = 8;
    static_assert(kBytes % (kAtOnce * 512) == 0);
#pragma unroll 1
    for (int i = 0; i < T::kPanels * kBytes; i += kAtOnce * 512) {
      const int panel = i / kBytes;
      char* at = s_.v[stage] + panel * T::kPanelBytes + helper_ * kBytes + i % kBytes + lane() * 16;
      uint4 chunk[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) chunk[j] = *reinterpret_cast<const uint4*>(at + j * 512);
      uint32_t sum = 0;  // of 0 x v: zero, or NaN
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        for (const uint32_t pair : {chunk[j].x, chunk[j].y, chunk[j].z, chunk[j].w})
          if constexpr (kBf16) {
            asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0u));
          } else {
            asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0u));
          }
      }
      if (sum == 0) continue;
      for (int j = 0; j < kAtOnce; ++j) found = mark(stage, at + j * 512, checked, marks) || found;
    }
    device::publish_to_async_proxy();
    const bool any = __any_sync(kAllLanes, found) != 0;
    if (lane() == 0) marked = any;
  }

 private:
  using Element = typename T::Element;
  static constexpr bool kBf16 = std::is_same_v<Element, bf16>;
  static constexpr uint32_t kExponent = kBf16 ? 0x7f80 : 0x7c00, kMantissa = 0x7fff & ~kExponent;

  __device__ __forceinline__ void clear(Marks<T>& marks) {
    for (int i = lane(); i < T::kHead; i += 32) marks.nan[i] = marks.plus[i] = marks.minus[i] = 0;
    __syncwarp();
  }
  /// Eight elements of a key.
  __device__ __noinline__ bool mark(int stage, char* at, const Checked& checked, Marks<T>& marks) {
    const int offset = static_cast<int>(at - s_.v[stage]) % T::kPanelBytes;
    const int key = offset / 128, column = static_cast<int>(at - s_.v[stage]) / T::kPanelBytes * 64 +
                                           ((offset / 16 ^ key) & 7) * 8;
    const bool seen = key >= checked.from && key < checked.to;
    bool found = false;
    for (int i = 0; i < 8; ++i) {
      uint16_t& element = reinterpret_cast<uint16_t*>(at)[i];
      const uint32_t bits = element;
      if ((bits & kExponent) != kExponent) continue;
      element = 0;
      if (!seen) continue;
      auto* to = (bits & kMantissa) != 0 ? marks.nan : (bits & 0x8000u) != 0 ? marks.minus : marks.plus;
      atomicOr(to + column + i, 1ull << key % T::kHelperKeys);
      found = true;
    }
    return found;
  }

  Shared<T>& s_;
  const int helper_;
};

/// Hands over boxes that are multiplied as they are stored.
template <class T>
class Pass {
 public:
  __device__ __forceinline__ Pass(Shared<T>& shared, int helper) : s_(shared), check_(shared, helper) {}

  __device__ __forceinline__ void run() {
    for (device::RingPosition<T::kStages> at;; at.next()) {
      device::wait_for(s_.v_landed + at.stage, at.parity);
      const Checked checked = s_.checked[at.stage];
      if (checked.to == Checked::kEnd) return;
      check_.run(at.stage, checked);
      __syncwarp();
      if (lane() == 0) device::arrive(s_.v_full + at.stage);
    }
  }

 private:
  Shared<T>& s_;
  Check<T> check_;
};

/// Widens fp8 from slots to where it is multiplied.
template <class T>
class Widen {
 public:
  __device__ __forceinline__ Widen(Shared<T>& shared, int helper)
      : s_(shared), helper_(helper), check_(shared, helper) {}

  __device__ __forceinline__ void run() {
    for (;; raw_.next()) {
      device::wait_for(s_.raw_landed + raw_.stage, raw_.parity);
      const Item item = s_.items[raw_.stage];
      if (item.kind == Item::keys) {
        device::wait_for(s_.k_empty + k_.stage, k_.parity);
        widen(s_.k[k_.stage], helper_ * T::kHelperKeys, T::kHelperKeys);
        hand_over(s_.k_full + k_.stage);
        k_.next();
      } else if (item.kind == Item::values) {
        device::wait_for(s_.v_empty + v_.stage, v_.parity);
        widen(s_.v[v_.stage], helper_ * T::kHelperKeys, T::kHelperKeys);
        __syncwarp();
        check_.run(v_.stage, item.checked);
        hand_over(s_.v_full + v_.stage);
        v_.next();
      } else {
        device::wait_for(&s_.q_empty, q_parity_);
        q_parity_ ^= 1;
        if (helper_ == 0 && lane() == 0) {
          s_.tile = item.tile;
          if (item.kind == Item::end) s_.tile.head_kv = -1;
        }
        if (item.kind == Item::queries) widen(s_.q, helper_ * T::kHelperKeys, T::kHelperKeys);
        hand_over(&s_.q_full);
        if (item.kind == Item::end) return;
      }
      if (lane() == 0) device::arrive(s_.raw_empty + raw_.stage);
    }
  }

 private:
  __device__ __forceinline__ void hand_over(Barrier* full) const {
    device::publish_to_async_proxy();
    __syncwarp();
    if (lane() == 0) device::arrive(full);
  }

  /// Rows [first, first + rows) of the slot at hand: queries or keys.
  __device__ __forceinline__ void widen(char* to, int first, int rows) const {
    constexpr int kChunks = T::kRawRowBytes / 16, kRowsAtOnce = 32 / kChunks, kAtOnce = 4;
    const char* raw = s_.raw[raw_.stage];
    const int chunk = lane() % kChunks, panel = chunk / 4;
    first += lane() / kChunks;
#pragma unroll 1
    for (int i = 0; i < rows; i += kAtOnce * kRowsAtOnce) {
      uint4 codes[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int row = first + i + j * kRowsAtOnce;
        const int place = kChunks == 8 ? (chunk ^ row) & 7 : (chunk ^ row >> 1) & 3;
        codes[j] = *reinterpret_cast<const uint4*>(raw + row * T::kRawRowBytes + place * 16);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int row = first + i + j * kRowsAtOnce;
        const uint4 halves[2] = {widened(codes[j].x, codes[j].y), widened(codes[j].z, codes[j].w)};
        char* line = to + (panel * T::kRows + row) * 128;
#pragma unroll
        for (int h = 0; h < 2;
             ++h) {  // the panels' lanes begin with different ones, so that no bank is asked twice
          const bool second = (h ^ panel & 1) != 0;
          *reinterpret_cast<uint4*>(line + ((2 * chunk + second ^ row) & 7) * 16) =
              second ? halves[1] : halves[0];
        }
      }
    }
  }
  __device__ __forceinline__ static uint4 widened(uint32_t low, uint32_t high) {
    const auto pair = [](uint32_t codes) {
      const __half2_raw two =
          __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xffffu), __NV_E4M3);
      return static_cast<uint32_t>(two.x) | static_cast<uint32_t>(two.y) << 16;
    };
    return {pair(low), pair(low >> 16), pair(high), pair(high >> 16)};
  }

  Shared<T>& s_;
  const int helper_;
  Check<T> check_;
  device::RingPosition<T::kRawSlots> raw_;
  device::RingPosition<T::kStages> k_{.stage = 0, .parity = 1}, v_{.stage = 0, .parity = 1};
  uint32_t q_parity_ = 1;
};

}  // namespace vivace::prefill_sm90
