#include "src/model/random_fill.h"

#include <algorithm>
#include <cmath>

#include "src/core/number.h"
#include "src/cpu/thread_pool.h"
#include "src/device/random.h"

namespace vivace::model {

namespace {

/// The sum of four uniform numbers, which is close to normal up to three deviations and costs one multiplication chain.
float near_normal(uint64_t seed, uint64_t index) {
  uint64_t z = seed * 0x9e3779b97f4a7c15ULL + (index + 1) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 30)) * 0x94d049bb133111ebULL;
  z = (z ^ (z >> 27)) * 0x2545f4914f6cdd1dULL;
  z ^= z >> 31;
  const auto sum = static_cast<float>((z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48));
  constexpr float kMean = 2 * 65535.f;
  const float deviation = 65536.f / std::sqrt(3.f);  // of four uniform numbers below 2^16
  return (sum - kMean) / deviation;
}

}  // namespace

Status fill_normal(const Tensor& tensor, float deviation, uint64_t seed, const Stream& stream) {
  if (stream.device == Device::cuda) return device::fill_normal(tensor, deviation, seed, stream);
  constexpr int64_t kPiece = int64_t{1} << 16;
  const int64_t count = tensor.elements();
  cpu::parallel_for(stream.threads, (count + kPiece - 1) / kPiece, [&](int64_t piece, int) {
    const int64_t end = std::min(count, (piece + 1) * kPiece);
    for (int64_t i = piece * kPiece; i < end; ++i) {
      store(tensor.dtype, tensor.data, i, deviation * near_normal(seed, static_cast<uint64_t>(i)));
    }
  });
  return {};
}

}  // namespace vivace::model
