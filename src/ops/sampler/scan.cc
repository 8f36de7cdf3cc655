// The vector passes of the sampler. A row of 49,152 fp32 logits is 192 KiB and stays in the second-level cache between
// them: a pass without exponentials is bound by that cache, one with them by arithmetic (about 20 operations per
// logit).

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/ops/sampler/scan.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "src/cpu/convert-inl.h"
#include "src/cpu/math-inl.h"
#include "src/cpu/simd.h"
#include "src/ops/sampler/scan.h"

HWY_BEFORE_NAMESPACE();
namespace vivace::HWY_NAMESPACE {

namespace {

using Tag = hn::CappedTag<float, kMaximaPerChunk>;
constexpr int64_t kLanes = hn::MaxLanes(Tag());
static_assert(kMaximaPerChunk % kLanes == 0 && kSampleChunk % kMaximaPerChunk == 0);
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Weights of a vector of logits; equals of an infinite maximum count 1.
HWY_INLINE hn::Vec<Tag> weigh(hn::Vec<Tag> v, Softmax softmax) {
  const Tag d;
  const auto max = hn::Set(d, softmax.max);
  const auto e = exp(d, hn::Mul(hn::Sub(v, max), hn::Set(d, softmax.inverse_temperature)));
  return hn::IfThenElse(hn::Eq(v, max), hn::Set(d, 1.0f), e);
}

}  // namespace

void load_row(DType dtype, const void* source, int64_t vocab, float* row) {
  with_storage(dtype, [&](auto type) {
    using T = decltype(type);
    const Tag d;
    const auto* from = static_cast<const typename T::Element*>(source);
    int64_t i = 0;
    for (; i + kLanes <= vocab; i += kLanes) hn::StoreU(load_as_f32(d, T{}, from + i), d, row + i);
    for (; i < vocab; ++i) row[i] = load_one(T{}, from + i);
  });
  std::fill(row + vocab, row + sample_chunks(vocab) * kSampleChunk, -kInfinity);
}

RowBounds bound_row(const float* row, int64_t chunks, float* maxima) {
  const Tag d;
  // Lane j of kMaximaPerChunk / kLanes vectors. A maximum may lose a NaN, so NaNs are noted apart.
  constexpr int kVectors = kMaximaPerChunk / kLanes;
  auto nan = hn::Zero(d);
  auto all = hn::Set(d, -kInfinity);
  for (int64_t c = 0; c < chunks; ++c) {
    hn::Vec<Tag> max[kVectors];
    for (int j = 0; j < kVectors; ++j) max[j] = hn::Set(d, -kInfinity);
    for (int64_t i = 0; i < kSampleChunk; i += kMaximaPerChunk) {
      for (int j = 0; j < kVectors; ++j) {
        const auto v = hn::Load(d, row + c * kSampleChunk + i + j * kLanes);
        nan = hn::Or(nan, hn::VecFromMask(d, hn::IsNaN(v)));
        max[j] = hn::Max(v, max[j]);
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      hn::StoreU(max[j], d, maxima + c * kMaximaPerChunk + j * kLanes);
      all = hn::Max(max[j], all);
    }
  }
  return {hn::GetLane(hn::MaxOfLanes(d, all)), !hn::AllFalse(d, hn::IsNaN(nan))};
}

double sum_row(const float* row, int64_t chunks, Softmax softmax, double* sums) {
  const Tag d;
  double total = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    const float* from = row + c * kSampleChunk;
    auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
    for (int64_t i = 0; i < kSampleChunk; i += 2 * kLanes) {
      sum0 = hn::Add(sum0, weigh(hn::Load(d, from + i), softmax));
      sum1 = hn::Add(sum1, weigh(hn::Load(d, from + i + kLanes), softmax));
    }
    sums[c] = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
    total += sums[c];
  }
  return total;
}

void weigh_chunk(const float* row, Softmax softmax, float* weights) {
  const Tag d;
  for (int64_t i = 0; i < kSampleChunk; i += kLanes) {
    hn::StoreU(weigh(hn::Load(d, row + i), softmax), d, weights + i);
  }
}

int64_t collect(const float* row, int64_t vocab, float threshold, Softmax softmax, Candidate* out) {
  const Tag d;
  const auto limit = hn::Set(d, threshold);
  Candidate* const begin = out;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const auto v = hn::Load(d, row + i);
    if (hn::AllFalse(d, hn::Ge(v, limit))) continue;
    float weights[kLanes];
    hn::StoreU(weigh(v, softmax), d, weights);
    const int64_t lanes = std::min<int64_t>(kLanes, vocab - i);
    for (int64_t j = 0; j < lanes; ++j) {
      // Written always, kept when it counts: no branch to mispredict.
      *out = {row[i + j], weights[j], static_cast<int32_t>(i + j)};
      out += row[i + j] >= threshold;
    }
  }
  return out - begin;
}

}  // namespace vivace::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace vivace::sample {

void load_row(DType dtype, const void* source, int64_t vocab, float* row) {
  VIVACE_SIMD(load_row)(dtype, source, vocab, row);
}
RowBounds bound_row(const float* row, int64_t chunks, float* maxima) {
  return VIVACE_SIMD(bound_row)(row, chunks, maxima);
}
double sum_row(const float* row, int64_t chunks, Softmax softmax, double* sums) {
  return VIVACE_SIMD(sum_row)(row, chunks, softmax, sums);
}
void weigh_chunk(const float* row, Softmax softmax, float* weights) {
  VIVACE_SIMD(weigh_chunk)(row, softmax, weights);
}
int64_t collect(const float* row, int64_t vocab, float threshold, Softmax softmax, Candidate* out) {
  return VIVACE_SIMD(collect)(row, vocab, threshold, softmax, out);
}

}  // namespace vivace::sample
#endif
