#pragma once

#include <sys/mman.h>

#include "src/ops/attention/problem.h"
#include "tests/ops/op_test.h"

// Shared by the tests of attention_prefill and attention_decode.

namespace vivace {

struct AttentionBounds {
  Bound output, lse;
};

/// From the arithmetic: a score is an fp32 sum of head_dim products of magnitude at most |q| |k|; its error moves
/// a weight and the denominator by as much, relatively; then come the exponential, the fp32 sums over the keys
/// and the store.
///
/// A row on a GPU multiplies on tensor cores. One product of 16 terms and the accumulator truncates each of the 17 at 2^-25 of
/// the largest, below 2^-20.9 of the sum of their magnitudes; a score takes head_dim / 16 of them, an output a 16th of the
/// keys. And it rounds weights to the 8 bits of bf16 before their product with V (11 of f16): 2^-9 of sum p|v|.
inline AttentionBounds attention_bounds(const AttentionArgs& args, Device device = Device::cpu) {
  double q_norm = 0, k_norm = 0, v_max = 0, most_keys = 1;
  const int64_t head_dim = args.q.shape[2];
  const auto norm = [&](const Tensor& t, int64_t offset) {
    double squares = 0;
    for (int64_t d = 0; d < head_dim; ++d) {
      const double v = load(t.dtype, t.data, offset + d);
      squares += v * v;
    }
    return std::sqrt(squares);
  };
  for (int64_t b = 0; b < args.page_table.shape[0]; ++b) {
    const RequestRange range = request_range(args, b);
    for (int64_t i = 0; i < range.rows; ++i) {
      const int64_t row = range.row_begin + i;
      for (int64_t h = 0; h < args.q.shape[1]; ++h)
        q_norm = std::max(q_norm, norm(args.q, row * args.q.stride[0] + h * args.q.stride[1]) *
                                      q_scale_of(args.q_scale, row, h));
    }
    if (range.rows == 0) continue;
    const int64_t first = range.first_key(0, args.window);
    most_keys = std::max(most_keys, static_cast<double>(range.keys - first));
    for (int64_t j = first; j < range.keys; ++j) {
      const int64_t page = args.page_table.at(b).as<const int32_t>()[j / args.k.shape[1]];
      const int64_t slot = j % args.k.shape[1];
      for (int64_t h = 0; h < args.k.shape[2]; ++h) {
        const int64_t k = page * args.k.stride[0] + slot * args.k.stride[1] + h * args.k.stride[2];
        k_norm = std::max(k_norm, norm(args.k, k) * k_scale_of(args.k_scale, page, slot, h));
        const int64_t v = page * args.v.stride[0] + slot * args.v.stride[1] + h * args.v.stride[2];
        for (int64_t d = 0; d < head_dim; ++d)
          v_max = std::max(
              v_max, std::abs(double{load(args.v.dtype, args.v.data, v + d)}) * v_scale_of(args.v_scale, h));
      }
    }
  }
  const bool gpu = device == Device::cuda;
  const double magnitude = softmax_scale_of(args) * q_norm * k_norm;
  double score =
      Bound::fp32_sum(head_dim, magnitude).absolute + 6 * 0x1p-24 * magnitude + 4 * 0x1p-24 * args.soft_cap;
  double sums = 4 * 0x1p-24 * std::sqrt(most_keys) + 0x1p-22;
  double values = 0;
  if (gpu) {
    constexpr double kProduct = 0x1p-20;  // of 17 terms, the quotients and exponentials of the softmax
    score += kProduct * (static_cast<double>(head_dim) / 16 + 1) * magnitude + kProduct * args.soft_cap;
    // f16 is a normal number down to 2^-14: below, a weight is off by up to 2^-25.
    const double weights = args.k.dtype == DType::f16 ? 0x1p-12 + most_keys * 0x1p-25 : 0x1p-9;
    values = weights + kProduct * (most_keys / 16 + 2);
    if (args.k.dtype == DType::f16) score += 0x1p-25 * softmax_scale_of(args) * k_norm * std::sqrt(head_dim);
  }
  // The reference is rounded to the stored type as well, and may land on the other side of a tie.
  const Bound store = Bound::store(args.output.dtype), store_lse = Bound::store(DType::f32);
  return {Bound{(2 * score + 2 * sums + values) * v_max, 0} + store + store,
          Bound{score + sums + (gpu ? 0x1p-22 : 0), 0} + store_lse + store_lse};
}

/// Calls body(stream, type) with the type of activations and cache that the rows of that device share: f32 on a CPU, bf16 on a
/// GPU. Cases made inside are in the device's memory.
template <class Body>
void on_streams(Body&& body) {
  for (const Stream& stream : test_streams()) {
    const bool gpu = stream.device == Device::cuda;
    const CaseMemoryScope scope(gpu ? GpuUnderTest::instance().memory : CaseMemory::current());
    body(stream, gpu ? DType::bf16 : DType::f32);
  }
}

/// The status of a call, once its stream is done with it.
inline Status done(Status status, const Stream& stream) {
  VIVACE_TRY(std::move(status));
  return finish(stream);
}

/// Copies `count` elements of a row, whatever the type.
inline void copy_elements(const Tensor& from, const Tensor& to, int64_t count) {
  std::memcpy(to.data, from.data, static_cast<size_t>(count * info_of(from.dtype).block_bytes));
}

/// What `value` is written to: keys [first, last) of request 0, or every query when there are none.
struct NanCase {
  const char* name;
  int64_t first, last;
  float value = NAN;
};

/// A whole piece of any cut, several, parts of one; with -infinity a piece without weight beside others.
inline constexpr NanCase kNanCases[] = {
    {"queries", 0, 0},
    {"all keys", 0, 400},
    {"keys 128 to 191", 128, 192},
    {"keys 256 to 399", 256, 400},
    {"key 77", 77, 78},
    {"the last key", 399, 400},
    {"-inf at 0 to 191", 0, 192, -INFINITY},
    {"-inf everywhere", 0, 400, -INFINITY},
};

struct NanOptions {
  bool sinks;
  double soft_cap;
  int64_t window;
};
inline constexpr NanOptions kNanOptions[] = {{false, 0, 0}, {true, 0, 0}, {true, 5, 150}};

/// For a row of request 0 that sees all keys, without a soft cap: -infinity everywhere is 0 / 0 unless there is a
/// sink.
inline bool nan_expected(const NanCase& c, const NanOptions& options) {
  return std::isnan(c.value) || (c.last - c.first == 400 && !options.sinks);
}

/// All queries positive, so that a score is NaN or -infinity exactly where its key is.
inline void set_nan(AttentionProblem& p, const NanCase& c) {
  const Tensor& q = p.args.q;
  for (int64_t t = 0; t < q.shape[0]; ++t) {
    for (int64_t i = 0; i < q.shape[1] * q.shape[2]; ++i)
      store(q.dtype, q.at(t).data, i,
            c.last == 0 ? c.value : std::abs(load(q.dtype, q.at(t).data, i)) + 0.01);
  }
  const int64_t seen = request_range(p.args, 0).first_key(0, p.args.window);
  for (int64_t j = std::max(c.first, seen); j < c.last; ++j)
    for (int64_t h = 0; h < p.args.k.shape[2]; ++h) p.set_key(0, j, h, c.value);
}

/// NaN and infinity in the same places, other numbers close; how close is the business of other tests.
inline ::testing::AssertionResult nan_alike(const Tensor& got, const Tensor& want) {
  const double near = got.dtype == DType::bf16 ? 0x1p-5 : 1e-3;  // of values up to 5
  const std::vector<double> g = values_of(got), w = values_of(want);
  for (size_t i = 0; i < w.size(); ++i) {
    const bool alike = std::isnan(w[i]) ? std::isnan(g[i]) : g[i] == w[i] || std::abs(g[i] - w[i]) < near;
    if (!alike) return ::testing::AssertionFailure() << "[" << i << "] is " << g[i] << ", needs " << w[i];
  }
  return ::testing::AssertionSuccess();
}

/// Address space that costs memory only where it is touched, for tensors with giant strides.
class SparseMemory {
 public:
  explicit SparseMemory(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                   0)) {}
  ~SparseMemory() {
    if (ok()) munmap(data_, bytes_);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_;
};

}  // namespace vivace
