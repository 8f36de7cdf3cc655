#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "src/core/dispatch.h"
#include "src/core/number.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/problem.h"

// Shared by the tests of all operators: every row of a table over every case that it accepts, against the
// reference.

namespace vivace {

#define EXPECT_OK(expression)                       \
  do {                                              \
    const ::vivace::Status status_ = (expression);  \
    EXPECT_TRUE(status_.ok()) << status_.message(); \
  } while (0)
#define ASSERT_OK(expression)                       \
  do {                                              \
    const ::vivace::Status status_ = (expression);  \
    ASSERT_TRUE(status_.ok()) << status_.message(); \
  } while (0)
/// The call fails with `code` and a message that contains `text`.
#define EXPECT_FAILS(expression, expected_code, text)                                \
  do {                                                                               \
    const ::vivace::Status status_ = (expression);                                   \
    EXPECT_EQ(status_.code(), expected_code) << status_.message();                   \
    EXPECT_NE(status_.message().find(text), std::string::npos) << status_.message(); \
  } while (0)

/// How far a value may be from the float64 reference: absolute + relative * |reference|.
/// Built from what the arithmetic does: rounding of the stored type plus the error of the sums.
struct Bound {
  double absolute = 0, relative = 0;
  Bound operator+(const Bound& other) const { return {absolute + other.absolute, relative + other.relative}; }
  /// Half an ulp of a stored value: 2^-p of it with p bits of precision.
  static Bound store(DType dtype) {
    switch (dtype) {
      case DType::bf16:
        return {0, 0x1p-8};
      case DType::f16:
        return {0x1p-25, 0x1p-11};
      default:
        return {0, 0x1p-24};
    }
  }
  /// An fp32 sum of `terms` products whose absolute values sum to at most `magnitude`: sqrt(terms) roundings
  /// with a factor of 4 for their spread.
  static Bound fp32_sum(int64_t terms, double magnitude) {
    return {4 * 0x1p-24 * std::sqrt(static_cast<double>(terms)) * magnitude, 0};
  }
};

/// The elements of a plain floating-point tensor of any rank, in row-major order.
inline std::vector<double> values_of(const Tensor& t) {
  std::vector<double> values;
  if (t.rank == 1) {
    for (int64_t i = 0; i < t.shape[0]; ++i) values.push_back(load(t.dtype, t.data, i * t.stride[0]));
    return values;
  }
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    const std::vector<double> row = values_of(t.at(i));
    values.insert(values.end(), row.begin(), row.end());
  }
  return values;
}

/// Every element within the bound; NaN is never close.
inline ::testing::AssertionResult close(const Tensor& got, const Tensor& want, const Bound& bound) {
  const std::vector<double> a = values_of(got), b = values_of(want);
  if (a.size() != b.size())
    return ::testing::AssertionFailure() << a.size() << " elements against " << b.size();
  for (size_t i = 0; i < a.size(); ++i) {
    const double allowed = bound.absolute + bound.relative * std::abs(b[i]);
    if (a[i] == b[i] || std::abs(a[i] - b[i]) <= allowed) continue;
    return ::testing::AssertionFailure()
           << "element " << i << " is " << a[i] << ", reference " << b[i] << ", allowed " << allowed;
  }
  return ::testing::AssertionSuccess();
}

/// CPU streams that tests run on: alone, and with a pool of three (more threads than this needs, fewer than
/// tasks).
inline std::vector<Stream> cpu_streams() {
  static cpu::ThreadPool pool(3);
  return {Stream{}, Stream{.threads = &pool}};
}

/// What vivace-gpu-tests adds to the tests of operators: its streams, memory that both sides reach, and how to wait.
struct GpuUnderTest {
  std::vector<Stream> streams;
  CaseMemory memory;
  Status (*synchronize)(const Stream& stream) = nullptr;

  static GpuUnderTest& instance() {
    static GpuUnderTest gpu;
    return gpu;
  }
};

/// The streams whose rows a test compares with the reference: the GPU's in vivace-gpu-tests, the CPU's elsewhere.
inline std::vector<Stream> test_streams() {
  const GpuUnderTest& gpu = GpuUnderTest::instance();
  return gpu.streams.empty() ? cpu_streams() : gpu.streams;
}

/// The memory that cases for this stream lie in, for a test that calls the operator itself.
inline const CaseMemory& memory_for(const Stream& stream) {
  return stream.device == Device::cuda ? GpuUnderTest::instance().memory : CaseMemory::current();
}

/// Until what was enqueued is done.
inline Status finish(const Stream& stream) {
  return stream.device == Device::cuda ? GpuUnderTest::instance().synchronize(stream) : Status();
}

/// A row that a test runs. On a GPU it brings the scratch that the row asks for, poisoned and guarded, and waits.
template <class Args>
struct RowUnderTest {
  const Row<Args>& row;
  std::string_view name = row.name;

  Status run(Args args, const Stream& stream) const {
    if (stream.device == Device::cpu) return row.run(args, stream);
    Guarded scratch;
    if constexpr (requires { args.workspace; }) {
      if (row.workspace_bytes != nullptr) scratch = Guarded(DType::u8, {row.workspace_bytes(args, stream)});
      args.workspace = scratch;
    }
    VIVACE_TRY(row.run(args, stream));
    VIVACE_TRY(finish(stream));
    return scratch.canaries_intact() ? Status()
                                     : Status(Code::internal, "the workspace's canaries were overwritten");
  }
};

/// Calls body(row) for each row of the operator that accepts the call, on this stream's device. Cases that the body
/// makes are in that device's memory.
template <class Args, class Body>
void for_each_fitting_row(const Operator<Args>& op, const Args& args, const Stream& stream, Body&& body) {
  Facts facts = op.facts(args);
  facts.add("compute_capability", stream.compute_capability);
  const CaseMemoryScope scope(memory_for(stream));
  for (const Row<Args>& row : op.rows) {
    bool fits = row.device == stream.device;
    for (const Need& need : row.needs) fits = fits && satisfied(need, facts);
    if (fits) body(RowUnderTest<Args>{row});
  }
}

/// Same shape, same bits.
inline ::testing::AssertionResult same_bits(const Tensor& a, const Tensor& b) {
  if (a.rank > 1) {
    if (a.shape[0] != b.shape[0])
      return ::testing::AssertionFailure() << a.shape[0] << " against " << b.shape[0];
    for (int64_t i = 0; i < a.shape[0]; ++i) {
      const ::testing::AssertionResult rows = same_bits(a.at(i), b.at(i));
      if (!rows) return ::testing::AssertionFailure() << "[" << i << "]" << rows.message();
    }
    return ::testing::AssertionSuccess();
  }
  const size_t bytes = static_cast<size_t>(info_of(a.dtype).block_bytes);
  for (int64_t i = 0; i < a.shape[0]; ++i) {
    if (std::memcmp(a.as<char>() + i * bytes, b.as<char>() + i * bytes, bytes) == 0) continue;
    return ::testing::AssertionFailure()
           << "[" << i << "] " << load(a.dtype, a.data, i) << " against " << load(b.dtype, b.data, i);
  }
  return ::testing::AssertionSuccess();
}

}  // namespace vivace
