#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace vivace::bench {

/// splitmix64 with our own distributions: the standard ones differ between C++ libraries.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  /// In (0, 1].
  double uniform() { return (static_cast<double>(next() >> 11) + 1) * 0x1p-53; }
  int64_t below(int64_t bound) { return static_cast<int64_t>(next() % static_cast<uint64_t>(bound)); }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }
  int64_t log_normal(double median, double sigma) {
    return std::max<int64_t>(1, std::llround(median * std::exp(sigma * normal())));
  }

 private:
  uint64_t state_;
};

/// A seed that JSON numbers keep exactly everywhere.
inline uint64_t sampling_seed(Random& random) {
  return random.next() >> 11;
}

/// Poisson arrivals.
class Arrivals {
 public:
  explicit Arrivals(double rate) : rate_(rate) {}
  double next(Random& random) {
    if (rate_ <= 0) return 0;
    const double now = time_;
    time_ += -std::log(random.uniform()) / rate_;
    return now;
  }

 private:
  double rate_, time_ = 0;
};

}  // namespace vivace::bench
