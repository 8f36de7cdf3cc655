// What a row that is right alone can still do wrong: every row of every operator over its cases, replayed as a graph over
// other contents, behind a kernel that writes the inputs late, and beside another stream. No bit may differ from a plain
// call over the same contents.

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "src/device/runtime.h"
#include "src/ops/attention_decode/cases.h"
#include "src/ops/attention_decode/table.h"
#include "src/ops/attention_prefill/cases.h"
#include "src/ops/attention_prefill/table.h"
#include "src/ops/attention_prologue/cases.h"
#include "src/ops/attention_prologue/table.h"
#include "src/ops/choose_experts/cases.h"
#include "src/ops/choose_experts/table.h"
#include "src/ops/decode_schedule/cases.h"
#include "src/ops/decode_schedule/table.h"
#include "src/ops/embedding/cases.h"
#include "src/ops/embedding/table.h"
#include "src/ops/fused_moe/cases.h"
#include "src/ops/fused_moe/table.h"
#include "src/ops/grouped_gemm/cases.h"
#include "src/ops/grouped_gemm/table.h"
#include "src/ops/linear/cases.h"
#include "src/ops/linear/table.h"
#include "src/ops/quantize_fp8/cases.h"
#include "src/ops/quantize_fp8/table.h"
#include "src/ops/rms_norm/cases.h"
#include "src/ops/rms_norm/table.h"
#include "src/ops/route_top_k/cases.h"
#include "src/ops/route_top_k/table.h"
#include "src/ops/router_gemm/cases.h"
#include "src/ops/router_gemm/table.h"
#include "src/ops/sampler/cases.h"
#include "src/ops/sampler/table.h"
#include "src/ops/silu_mul/cases.h"
#include "src/ops/silu_mul/table.h"
#include "tests/gpu/late_copy.h"
#include "tests/large.h"
#include "tests/ops/attention_test.h"
#include "tests/ops/op_test.h"

namespace vivace::testing {
namespace {

/// The memory of one problem, in the order in which it was taken: the same for all problems of a case.
using Contents = std::vector<std::span<uint8_t>>;
Contents* recorded = nullptr;

void* allocate_recorded(size_t bytes) {
  auto* memory = static_cast<uint8_t*>(GpuUnderTest::instance().memory.allocate(bytes));
  recorded->emplace_back(memory, bytes);
  return memory;
}

void release_recorded(void* memory) {
  if (recorded != nullptr)
    std::erase_if(*recorded, [&](const auto& piece) { return piece.data() == memory; });
  GpuUnderTest::instance().memory.release(memory);
}

/// Makes the contents of seed 2 others than those of seed 1 where the seed alone does not.
template <class Problem>
void vary(Problem&) {}
void vary(DecodeScheduleProblem& p) {
  int32_t* lengths = p.kv_lengths.as<int32_t>();
  for (int64_t b = 0; b < p.kv_lengths.tensor().shape[0]; ++b) lengths[b] -= lengths[b] / 3;
}
void vary(RouteTopKProblem& p) {
  if (p.args.live_tokens.present()) p.live_tokens.as<int32_t>()[0] += 2;
}
void vary(ChooseExpertsProblem& p) {
  vary(p.choice);
}

template <class Problem>
struct Recorded {
  Contents contents;
  std::unique_ptr<Problem> problem;

  template <class Case>
  Recorded(const Case& c, uint32_t seed) {
    const CaseMemoryScope scope(
        {.device = Device::cuda, .allocate = allocate_recorded, .release = release_recorded});
    recorded = &contents;
    problem = std::make_unique<Problem>(c, seed);
    recorded = nullptr;
    if (seed == 2) vary(*problem);
  }
  bool same_shape(const Recorded& other) const {
    return std::ranges::equal(contents, other.contents, {}, &std::span<uint8_t>::size,
                              &std::span<uint8_t>::size);
  }
  void take(const Recorded& other) {
    for (size_t i = 0; i < contents.size(); ++i) std::ranges::copy(other.contents[i], contents[i].begin());
  }
  bool equals(const Recorded& other) const {
    for (size_t i = 0; i < contents.size(); ++i) {
      if (!std::ranges::equal(contents[i], other.contents[i])) return false;
    }
    return true;
  }
};

Status wait(const Stream& stream) {
  return GpuUnderTest::instance().synchronize(stream);
}

/// A call of a row with scratch of its own.
template <class Args>
class Call {
 public:
  Call(const Row<Args>& row, const Args& args, const Stream& stream) : row_(row), args_(args) {
    if constexpr (requires { args_.workspace; }) {
      if (row.workspace_bytes != nullptr) scratch_ = Guarded(DType::u8, {row.workspace_bytes(args, stream)});
      args_.workspace = scratch_;
    }
  }
  Status operator()(const Stream& stream) const { return row_.run(args_, stream); }

 private:
  const Row<Args>& row_;
  Args args_;
  Guarded scratch_;
};

/// The call behind a kernel that writes all of `target`, late, from `source`.
template <class Problem, class Args>
void run_behind_late_copy(const Call<Args>& call, const Recorded<Problem>& target,
                          const Recorded<Problem>& source, const Stream& stream) {
  Guarded tasks(DType::u8, {static_cast<int64_t>(source.contents.size() * sizeof(CopyTask))});
  auto* task = tasks.template as<CopyTask>();
  for (size_t i = 0; i < source.contents.size(); ++i) {
    task[i] = {target.contents[i].data(), source.contents[i].data(),
               static_cast<int64_t>(source.contents[i].size())};
  }
  ASSERT_OK(late_copy({task, source.contents.size()}, stream));
  ASSERT_OK(call(stream));
  ASSERT_OK(wait(stream));
}

template <class Problem, class Args, class Case>
void expect_same_bits(const Operator<Args>& op, std::span<const Case> cases) {
  const Stream stream = GpuUnderTest::instance().streams.front();
  const auto second = device::OwnedStream::create(stream.ordinal);
  ASSERT_TRUE(second.ok()) << second.status().message();
  int64_t tested = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    const Recorded<Problem> shapes(c, 1);
    for_each_fitting_row(op, shapes.problem->args, stream, [&](const auto& under_test) {
      SCOPED_TRACE(::testing::Message() << under_test.name << ", case " << i);
      Recorded<Problem> target(c, 1), want(c, 2);
      const Recorded<Problem> source(c, 2);
      if (!target.same_shape(source)) return;  // its lists depend on the seed
      const Call<Args> plain(under_test.row, want.problem->args, stream);
      const Call<Args> call(under_test.row, target.problem->args, stream);
      ASSERT_OK(plain(stream));
      ASSERT_OK(wait(stream));

      const auto graph = device::Graph::capture(stream, std::cref(call));
      ASSERT_TRUE(graph.ok()) << graph.status().message();
      ASSERT_OK((*graph)->launch(stream));
      ASSERT_OK(wait(stream));
      target.take(source);
      ASSERT_OK((*graph)->launch(stream));
      ASSERT_OK(wait(stream));
      EXPECT_TRUE(target.equals(want)) << "replayed over other contents";

      const Recorded<Problem> before(c, 1);
      target.take(before);
      run_behind_late_copy(call, target, source, stream);
      EXPECT_TRUE(target.equals(want)) << "behind a kernel that writes the inputs late";

      Recorded<Problem> beside(c, 2);
      const Call<Args> call_beside(under_test.row, beside.problem->args, stream);
      for (int round = 0; round < 3; ++round) {
        target.take(source);
        beside.take(source);
        ASSERT_OK(call(stream));
        ASSERT_OK(call_beside((*second)->stream()));
        ASSERT_OK(wait(stream));
        ASSERT_OK(wait((*second)->stream()));
        EXPECT_TRUE(target.equals(want) && beside.equals(want)) << "beside another stream";
      }
      ++tested;
    });
  }
  EXPECT_GT(tested, 0);
}

TEST(SameBits, AttentionDecode) {
  expect_same_bits<AttentionDecodeProblem>(kAttentionDecode, attention_decode_cases(CaseSize::test));
}

/// With old_keys_ready a row may load before the kernel ahead of it has ended: not what that kernel writes, which is this step's
/// queries, keys and values.
TEST(SameBits, AttentionDecodeBeforeItsQueriesAreThere) {
  const Stream stream = GpuUnderTest::instance().streams.front();
  int64_t tested = 0;
  for (const AttentionDecodeCase& c : attention_decode_cases(CaseSize::test)) {
    Recorded<AttentionDecodeProblem> want(c, 1), target(c, 1);
    const Recorded<AttentionDecodeProblem> source(c, 1);
    for_each_fitting_row(kAttentionDecode, want.problem->args, stream, [&](const auto& under_test) {
      SCOPED_TRACE(::testing::Message() << under_test.name << ", " << c.name);
      want.take(source);
      const Call<AttentionDecodeArgs> plain(under_test.row, want.problem->args, stream);
      ASSERT_OK(plain(stream));
      ASSERT_OK(wait(stream));

      target.take(source);
      AttentionDecodeProblem& p = *target.problem;
      std::memset(p.q.as<char>(), 0x55, static_cast<size_t>(p.q.tensor().bytes()));
      for (int64_t b = 0; b < std::ssize(c.attention.requests); ++b) {
        const AttentionRequest& request = c.attention.requests[b];
        for (int64_t key = std::max<int64_t>(0, request.keys - request.rows); key < request.keys; ++key) {
          for (int64_t head = 0; head < c.attention.heads_kv; ++head) {
            p.set_key(b, key, head, 3);
            p.set_value(b, key, head, -3);
          }
        }
      }
      AttentionDecodeArgs early = p.args;
      early.old_keys_ready = true;
      const Call<AttentionDecodeArgs> call(under_test.row, early, stream);
      run_behind_late_copy(call, target, source, stream);
      EXPECT_TRUE(target.equals(want));
      ++tested;
    });
  }
  EXPECT_GT(tested, 0);
}
TEST(SameBits, AttentionPrefill) {
  expect_same_bits<AttentionPrefillProblem>(kAttentionPrefill, attention_prefill_cases(CaseSize::test));
}
TEST(SameBits, AttentionPrologue) {
  expect_same_bits<AttentionPrologueProblem>(kAttentionPrologue, attention_prologue_cases(CaseSize::test));
}
TEST(SameBits, ChooseExperts) {
  expect_same_bits<ChooseExpertsProblem>(kChooseExperts, choose_experts_cases(CaseSize::test));
}
TEST(SameBits, DecodeSchedule) {
  expect_same_bits<DecodeScheduleProblem>(kDecodeSchedule, decode_schedule_cases(CaseSize::test));
}
TEST(SameBits, Embedding) {
  expect_same_bits<EmbeddingProblem>(kEmbedding, embedding_cases(CaseSize::test));
}
TEST(SameBits, FusedMoe) {
  expect_same_bits<FusedMoeProblem>(kFusedMoe, fused_moe_cases(CaseSize::test));
}
TEST(SameBits, GroupedGemm) {
  expect_same_bits<GroupedGemmProblem>(kGroupedGemm, grouped_gemm_cases(CaseSize::test));
}
TEST(SameBits, Linear) {
  expect_same_bits<LinearProblem>(kLinear, linear_cases(CaseSize::test));
}
TEST(SameBits, QuantizeFp8) {
  expect_same_bits<QuantizeFp8Problem>(kQuantizeFp8, quantize_fp8_cases(CaseSize::test));
}
TEST(SameBits, RmsNorm) {
  expect_same_bits<RmsNormProblem>(kRmsNorm, rms_norm_cases(CaseSize::test));
}
TEST(SameBits, RouteTopK) {
  expect_same_bits<RouteTopKProblem>(kRouteTopK, route_top_k_cases(CaseSize::test));
}
TEST(SameBits, RouterGemm) {
  expect_same_bits<RouterGemmProblem>(kRouterGemm, router_gemm_cases(CaseSize::test));
}
/// With weight_ready a row may load the weights before the kernel ahead of it has ended: not what late(problem) names, which that
/// kernel writes.
template <class Problem, class Args, class Case, class Late>
void expect_same_bits_with_ready_weights(const Operator<Args>& op, std::span<const Case> cases, Late&& late) {
  const Stream stream = GpuUnderTest::instance().streams.front();
  int64_t tested = 0;
  for (const Case& c : cases) {
    Recorded<Problem> want(c, 1), target(c, 1);
    const Recorded<Problem> source(c, 1);
    for_each_fitting_row(op, want.problem->args, stream, [&](const auto& under_test) {
      SCOPED_TRACE(::testing::Message() << under_test.name << ", " << c.name);
      want.take(source);
      const Call<Args> plain(under_test.row, want.problem->args, stream);
      ASSERT_OK(plain(stream));
      ASSERT_OK(wait(stream));

      target.take(source);
      for (Guarded* input : late(*target.problem)) {
        if (input->tensor().present())
          std::memset(input->as<char>(), 0x55, static_cast<size_t>(input->tensor().bytes()));
      }
      Args early = target.problem->args;
      early.weight_ready = true;
      const Call<Args> call(under_test.row, early, stream);
      run_behind_late_copy(call, target, source, stream);
      EXPECT_TRUE(target.equals(want));
      ++tested;
    });
  }
  EXPECT_GT(tested, 0);
}
TEST(SameBits, RouterGemmBeforeItsTokensAreThere) {
  expect_same_bits_with_ready_weights<RouterGemmProblem>(kRouterGemm, router_gemm_cases(CaseSize::test),
                                                         [](RouterGemmProblem& p) {
                                                           return std::array{&p.x, &p.bias};
                                                         });
}
TEST(SameBits, LinearBeforeItsTokensAreThere) {
  expect_same_bits_with_ready_weights<LinearProblem>(
      kLinear, linear_cases(CaseSize::test), [](LinearProblem& p) {
        return std::array{&p.x, &p.x_scale, &p.bias[0], &p.bias[1], &p.bias[2]};
      });
}
TEST(SameBits, Sampler) {
  expect_same_bits<SamplerProblem>(kSampler, sampler_cases(CaseSize::test));
}
TEST(SameBits, SiluMul) {
  expect_same_bits<SiluMulProblem>(kSiluMul, silu_mul_cases(CaseSize::test));
}

// A graph of a decode step holds the schedule and the attention; it is replayed as requests grow, end and begin.
TEST(SameBits, AGraphOfScheduleAndDecodeFollowsTheLengths) {
  const Stream stream = GpuUnderTest::instance().streams.front();
  const AttentionDecodeCase c = {{.name = "",
                                  .requests = {{1000, 1}, {64, 1}, {300, 1}, {65, 1}},
                                  .heads_q = 8,
                                  .heads_kv = 2,
                                  .head_dim = 128,
                                  .q = DType::bf16,
                                  .kv = DType::bf16},
                                 {.workers = 7}};
  Recorded<AttentionDecodeProblem> target(c, 1), want(c, 1);
  const auto step = [](AttentionDecodeProblem& p, Guarded& scratch, const Stream& s) -> Status {
    VIVACE_TRY(decode_schedule({.kv_lengths = p.kv_lengths,
                                .query_start = p.query_start,
                                .params = p.args.params,
                                .schedule = p.schedule},
                               s));
    AttentionDecodeArgs args = p.args;
    args.workspace = scratch;
    return attention_decode(args, s);
  };
  const Result<int64_t> bytes = attention_decode_workspace_bytes(target.problem->args, stream);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  const CaseMemoryScope scope(GpuUnderTest::instance().memory);
  Guarded scratch(DType::u8, {*bytes}), other_scratch(DType::u8, {*bytes});
  ASSERT_OK(step(*target.problem, scratch, stream));
  const auto graph =
      device::Graph::capture(stream, [&](const Stream& s) { return step(*target.problem, scratch, s); });
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{1000, 64, 300, 65},
                                              {1, 64, 3, 65},
                                              {0, 0, 0, 0},
                                              {999, 1, 0, 64},
                                              {1000, 64, 300, 65}}) {
    std::ranges::copy(lengths, target.problem->kv_lengths.as<int32_t>());
    std::ranges::copy(lengths, want.problem->kv_lengths.as<int32_t>());
    for (Recorded<AttentionDecodeProblem>* p : {&target, &want}) {
      p->problem->output.poison();
      p->problem->lse.poison();
    }
    ASSERT_OK((*graph)->launch(stream));
    ASSERT_OK(step(*want.problem, other_scratch, stream));
    ASSERT_OK(wait(stream));
    EXPECT_TRUE(target.equals(want)) << lengths[0] << " keys of the first request";
  }
}

/// Batches that alternate between long and short, each with its schedule, in one workspace: what the one leaves there never
/// reaches the other.
TEST(SameBits, AttentionDecodeOfBatchesThatTakeTurns) {
  const Stream stream = GpuUnderTest::instance().streams.front();
  const int turns = large_tests() ? 100'000 : 1'000;
  for (const DType kv : {DType::bf16, DType::fp8_e4m3}) {
    SCOPED_TRACE(name_of(kv));
    const auto batch = [&](std::vector<AttentionRequest> requests) {
      return AttentionDecodeCase{{.name = "",
                                  .requests = std::move(requests),
                                  .heads_q = 8,
                                  .heads_kv = 1,
                                  .head_dim = 128,
                                  .page_tokens = 64,
                                  .q = kv,
                                  .kv = kv},
                                 {.tile_tokens = 64, .workers = 1056}};
    };
    const AttentionDecodeCase cases[] = {batch({{9000, 1}, {64, 1}, {2000, 1}}),
                                         batch(std::vector<AttentionRequest>(40, {70, 1}))};
    Recorded<AttentionDecodeProblem> batches[] = {{cases[0], 1}, {cases[1], 2}};
    int64_t bytes = 0;
    for (Recorded<AttentionDecodeProblem>& b : batches) {
      const Result<int64_t> needed = attention_decode_workspace_bytes(b.problem->args, stream);
      ASSERT_OK(needed.status());
      bytes = std::max(bytes, *needed);
    }
    const CaseMemoryScope scope(GpuUnderTest::instance().memory);
    const Guarded workspace(DType::u8, {bytes});
    std::vector<uint8_t> first[2];
    const auto run = [&](AttentionDecodeProblem& p) -> Status {
      p.args.workspace = workspace;
      VIVACE_TRY(decode_schedule({.kv_lengths = p.kv_lengths,
                                  .query_start = p.query_start,
                                  .params = p.args.params,
                                  .schedule = p.schedule},
                                 stream));
      VIVACE_TRY(attention_decode(p.args, stream));
      return wait(stream);
    };
    for (int turn = 0; turn < turns; ++turn) {
      AttentionDecodeProblem& p = *batches[turn % 2].problem;
      std::memset(p.output.as<char>(), 0x55, static_cast<size_t>(p.output.bytes()));
      ASSERT_OK(run(p));
      const auto* bits = p.output.as<uint8_t>();
      if (turn < 2) {
        first[turn].assign(bits, bits + p.output.bytes());
        AttentionDecodeProblem want(cases[turn], static_cast<uint32_t>(turn + 1));
        ASSERT_OK(attention_decode_reference(want.args, Stream{}));
        const Bound bound = attention_bounds(want.args.attention, Device::cuda).output;
        EXPECT_TRUE(close(p.args.attention.output, want.args.attention.output, bound));
        if (stream.compute_capability == 90) {
          EXPECT_TRUE(attention_decode_explain(p.args, stream).row.starts_with("sm90."));
        }
      }
      ASSERT_EQ(std::memcmp(bits, first[turn % 2].data(), first[turn % 2].size()), 0) << "turn " << turn;
    }
    // One behind the other with no wait between, each beginning before those ahead have ended.
    for (int turn = 0; turn < 64; ++turn) {
      AttentionDecodeProblem& p = *batches[turn / 2 % 2].problem;
      if (turn % 4 == 0) {
        for (Recorded<AttentionDecodeProblem>& b : batches)
          std::memset(b.problem->output.as<char>(), 0x55, static_cast<size_t>(b.problem->output.bytes()));
      }
      p.args.old_keys_ready = true;
      ASSERT_OK(attention_decode(p.args, stream));
      if (turn % 4 < 3) continue;
      ASSERT_OK(wait(stream));
      for (int i = 0; i < 2; ++i)
        ASSERT_EQ(std::memcmp(batches[i].problem->output.as<char>(), first[i].data(), first[i].size()), 0)
            << "batch " << i << ", turn " << turn;
    }
    EXPECT_TRUE(workspace.canaries_intact());
  }
}

}  // namespace
}  // namespace vivace::testing
