#include "src/core/dispatch.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "src/ops/silu_mul/table.h"

namespace {
thread_local int64_t allocations = 0;
}  // namespace

void* operator new(size_t bytes) {
  ++allocations;
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace vivace {
namespace {

Facts no_facts(const SiluMulArgs& args) {
  return Facts().add("width", args.y.shape[1]);
}
Status succeed(const SiluMulArgs&, const Stream&) {
  return {};
}
int64_t ten_bytes(const SiluMulArgs&, const Stream&) {
  return 10;
}

constexpr Need kNarrow[] = {{"width", Need::at_most, 8}};
constexpr Row<SiluMulArgs> kRows[] = {
    {"cpu.narrow", Device::cpu, kNarrow, succeed, ""},
    {"cpu.any", Device::cpu, {}, succeed, "", ten_bytes},
    {"reference", Device::cpu, {}, succeed, ""},
};
constexpr Operator<SiluMulArgs> kOwn = {"silu_mul", "a table that is not listed", no_facts, silu_mul_cost,
                                        kRows};

SiluMulArgs call(int64_t width) {
  SiluMulArgs args;
  args.y = Tensor(nullptr, DType::f32, {1, width});
  return args;
}

/// Two tables of one Args type and one name: only the listed one counts, whichever is called first.
TEST(Dispatch, CountsByTable) {
  float x[4] = {}, y[4];
  const SiluMulArgs args{Tensor(x, DType::f32, {1, 4}), Tensor(x, DType::f32, {1, 4}),
                         Tensor(y, DType::f32, {1, 4})};
  Dispatch counts;
  const Stream stream{.dispatch = &counts};
  ASSERT_TRUE(dispatch(kOwn, args, stream).ok());
  EXPECT_TRUE(counts.counts().empty());
  ASSERT_TRUE(dispatch(kSiluMul, args, stream).ok());
  ASSERT_TRUE(dispatch(kOwn, args, stream).ok());
  ASSERT_EQ(counts.counts().size(), 1u);
  EXPECT_EQ(counts.counts()[0].op, "silu_mul");
  EXPECT_EQ(counts.counts()[0].calls, 1);
}

TEST(Dispatch, EveryListedOperatorHasItsIndex) {
  EXPECT_EQ(operators()[operator_index(kSiluMul.rows.data())].name, "silu_mul");
  EXPECT_EQ(operator_index(kOwn.rows.data()), -1);
  EXPECT_LE(operators().size(), static_cast<size_t>(Dispatch::kMaxOps));
  for (const OpInfo& op : operators()) EXPECT_LE(op.rows.size(), static_cast<size_t>(Dispatch::kMaxRows));
}

/// Writes down what it sees; refuses when told to.
struct Notes final : OperatorObserver {
  std::vector<std::string> lines;
  Status answer;

  Status before(int op, int row, const Cost& cost, const Stream&) override {
    lines.push_back(
        fmt::format("{} {} {}", operators()[op].name, operators()[op].rows[row].name, cost.bytes));
    return answer;
  }
  Status after(const Stream&) override {
    lines.emplace_back("after");
    return {};
  }
};

TEST(Dispatch, AnObserverSeesListedCalls) {
  float x[4] = {1, 2, 3, 4}, y[4] = {};
  const SiluMulArgs args{Tensor(x, DType::f32, {1, 4}), Tensor(x, DType::f32, {1, 4}),
                         Tensor(y, DType::f32, {1, 4})};
  Dispatch account;
  ASSERT_TRUE(account.prefer("silu_mul=reference").ok());
  Notes notes;
  OperatorObserver::set(account, &notes);
  Stream stream{.dispatch = &account};
  ASSERT_TRUE(dispatch(kOwn, args, stream).ok());
  EXPECT_TRUE(notes.lines.empty());
  ASSERT_TRUE(dispatch(kSiluMul, args, stream).ok());
  EXPECT_EQ(notes.lines, (std::vector<std::string>{"silu_mul reference 48", "after"}));
  stream.check_only = true;
  ASSERT_TRUE(dispatch(kSiluMul, args, stream).ok());
  EXPECT_EQ(notes.lines.size(), 2u) << "a question is no call";
  stream.check_only = false;

  notes.answer = Status(Code::internal, "no");
  y[0] = 7;
  EXPECT_EQ(dispatch(kSiluMul, args, stream).message(), "no");
  EXPECT_EQ(y[0], 7) << "the call did not run";
  EXPECT_EQ(notes.lines.back(), "silu_mul reference 48");

  OperatorObserver::set(account, nullptr);
  EXPECT_EQ(OperatorObserver::of(account), nullptr);
  ASSERT_TRUE(dispatch(kSiluMul, args, stream).ok());
  EXPECT_EQ(notes.lines.size(), 3u);
}

/// Memory that one query and one call take.
int64_t allocations_of(const SiluMulArgs& args) {
  const int64_t before = allocations;
  const Result<int64_t> bytes = workspace_bytes(kOwn, args, Stream{});
  const Status status = dispatch(kOwn, args, Stream{});
  const int64_t taken = allocations - before;
  EXPECT_TRUE(bytes.ok() && status.ok());
  return taken;
}

/// A row that refuses costs no memory when a later one fits: reasons are collected for an error alone.
TEST(Dispatch, RefusalsAreFreeWhenARowFits) {
  EXPECT_EQ(allocations_of(call(9)), allocations_of(call(8)));
}

/// A preference restricts the choice: what it names refuses, so the call fails although another row fits.
TEST(Dispatch, APreferenceIsNoFallback) {
  Dispatch preference;
  ASSERT_TRUE(preference.prefer("silu_mul=reference").ok());
  Stream stream{.dispatch = &preference};
  EXPECT_EQ(explain(kOwn, call(4), stream).row, "reference");
  ASSERT_TRUE(preference.prefer("silu_mul=cpu").ok());
  EXPECT_EQ(explain(kOwn, call(4), stream).row, "cpu.narrow");
  EXPECT_EQ(explain(kOwn, call(9), stream).row, "cpu.any");

  constexpr Operator<SiluMulArgs> kNarrowFirst = {"silu_mul", "", no_facts, silu_mul_cost,
                                                  std::span(kRows).first(1)};
  for (const Status& status :
       {dispatch(kNarrowFirst, call(9), stream), workspace_bytes(kNarrowFirst, call(9), stream).status()}) {
    EXPECT_EQ(status.code(), Code::unsupported);
    EXPECT_EQ(status.message(),
              "silu_mul: the preferred row 'cpu' does not fit this call: cpu.narrow: needs width <= 8, got 9");
  }
}

}  // namespace
}  // namespace vivace
