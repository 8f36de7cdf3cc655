#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "src/ops/sampler/cases.h"
#include "src/ops/sampler/random.h"
#include "src/ops/sampler/table.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

template <class T>
std::vector<T> list_of(const Tensor& t) {
  return t.present() ? std::vector<T>(t.as<T>(), t.as<T>() + t.elements()) : std::vector<T>();
}

TEST(Sampler, EveryRowAgreesWithTheReference) {
  for (const SamplerCase& c : sampler_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    SamplerProblem want(c, 1);
    ASSERT_OK(sampler_reference(want.args, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kSampler, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        SamplerProblem got(c, 1, stream);
        ASSERT_OK(row.run(got.args, stream));
        // A draw may differ where u * total is within 1e-6 of a running sum; no row of these cases is so close.
        EXPECT_EQ(list_of<int32_t>(got.args.ids), list_of<int32_t>(want.args.ids));
        EXPECT_EQ(list_of<uint8_t>(got.args.valid), list_of<uint8_t>(want.args.valid));
        EXPECT_EQ(list_of<int32_t>(got.args.top_ids), list_of<int32_t>(want.args.top_ids));
        // The sum of exponentials errs by the rounding of (l - max), below 64 here, 2 ulp of exp and 32 additions in
        // a lane, relative to itself; then the store.
        const Bound logprob{(64 + 4 + 32) * 0x1p-24, 2 * 0x1p-24};
        if (c.logprobs >= 0) {
          EXPECT_TRUE(close(got.args.logprobs, want.args.logprobs, logprob));
        }
        if (c.logprobs > 0) {
          EXPECT_TRUE(close(got.args.top_logprobs, want.args.top_logprobs, logprob));
        }
        for (const Guarded* g : {&got.ids, &got.valid, &got.workspace}) EXPECT_TRUE(g->canaries_intact());
        EXPECT_EQ(std::memcmp(got.logits.as<void>(), want.logits.as<void>(), want.logits.bytes()), 0);
      });
    }
  }
}

/// Samples rows over one set of logits each, through one row of the table.
struct Samples {
  std::vector<int32_t> ids;
  std::vector<uint8_t> valid;
  std::vector<float> logprobs;
};
Samples sample(const Tensor& logits, const std::vector<SampleRow>& rows,
               const Row<SamplerArgs>& implementation, const Stream& stream = {}) {
  const int64_t count = static_cast<int64_t>(rows.size());
  Samples s{std::vector<int32_t>(count, -7), std::vector<uint8_t>(count, 7), std::vector<float>(count, NAN)};
  SamplerArgs args{.logits = logits,
                   .rows = rows,
                   .ids = Tensor(s.ids.data(), DType::i32, {count}),
                   .valid = Tensor(s.valid.data(), DType::u8, {count}),
                   .logprobs = Tensor(s.logprobs.data(), DType::f32, {count})};
  const Result<int64_t> bytes = sampler_workspace_bytes(args, stream);
  EXPECT_TRUE(bytes.ok());
  std::vector<uint8_t> memory(*bytes, 0xFF);
  args.workspace = Tensor(memory.data(), DType::u8, {*bytes});
  EXPECT_OK(implementation.run(args, stream));
  return s;
}

/// The same logits for `count` rows.
struct Repeated {
  std::vector<float> values;
  Tensor logits;
  Repeated(std::vector<float> row, int64_t count) : values(std::move(row)) {
    logits = Tensor(values.data(), DType::f32, {count, static_cast<int64_t>(values.size())});
    logits.stride[0] = 0;
  }
};

TEST(Random, PhiloxKnownAnswers) {
  // From the authors' published vectors for philox4x32 with 10 rounds.
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, UniformOverSeedsAndPositions) {
  // 64 bins, chi-square with 63 degrees of freedom: 103.4 is its 99.9 % quantile. Consecutive seeds and consecutive
  // positions must both look uniform.
  for (bool over_seeds : {false, true}) {
    std::vector<int> bins(64);
    constexpr int kDraws = 64000;
    for (int i = 0; i < kDraws; ++i) {
      const double u = over_seeds ? draw_uniform(i, 5) : draw_uniform(11, i);
      ASSERT_TRUE(u >= 0 && u < 1);
      ++bins[static_cast<size_t>(u * 64)];
    }
    double chi = 0;
    for (int n : bins) chi += (n - 1000.0) * (n - 1000.0) / 1000;
    EXPECT_LT(chi, 103.4);
  }
}

/// Chi-square of draws against probabilities; tokens of probability 0 must never come.
void expect_distribution(const SampleRow& params, const std::vector<float>& logits,
                         const std::vector<double>& want, double limit) {
  constexpr int kDraws = 20000;
  std::vector<SampleRow> rows(kDraws, params);
  for (int i = 0; i < kDraws; ++i) rows[i].seed = 1000 + i;
  const Repeated repeated(logits, kDraws);
  for (const Row<SamplerArgs>& row : kSamplerRows) {
    SCOPED_TRACE(row.name);
    std::map<int32_t, int> count;
    for (int32_t id : sample(repeated.logits, rows, row).ids) ++count[id];
    double chi = 0;
    for (size_t id = 0; id < want.size(); ++id) {
      const int n = count[static_cast<int32_t>(id)];
      if (want[id] == 0) {
        EXPECT_EQ(n, 0) << id;
      } else {
        chi += (n - kDraws * want[id]) * (n - kDraws * want[id]) / (kDraws * want[id]);
      }
    }
    EXPECT_LT(chi, limit);
  }
}

TEST(Sampler, DrawsFollowTheProbabilities) {
  // Weights 1, 2, 3, 4, 10 of 20. Limits: 99.9 % quantiles of chi-square with (kept - 1) degrees of freedom.
  const std::vector<float> logits = {0, std::log(2.0f), std::log(3.0f), std::log(4.0f), std::log(10.0f)};
  expect_distribution({}, logits, {0.05, 0.1, 0.15, 0.2, 0.5}, 18.5);
  expect_distribution({.temperature = 0.5}, logits, {1 / 130., 4 / 130., 9 / 130., 16 / 130., 100 / 130.},
                      18.5);
  expect_distribution({.top_k = 3}, logits, {0, 0, 3 / 17., 4 / 17., 10 / 17.}, 13.9);
  // 0.5 < 0.6, so the next token comes in too: a set that reaches 0.6.
  expect_distribution({.top_p = 0.6}, logits, {0, 0, 0, 4 / 14., 10 / 14.}, 10.9);
  expect_distribution({.top_p = 0.49}, logits, {0, 0, 0, 0, 1}, 1e-9);
  expect_distribution({.min_p = 0.25}, logits, {0, 0, 3 / 17., 4 / 17., 10 / 17.}, 13.9);
  // top_p counts what top_k left: 10 / 17 < 0.6, 14 / 17 >= 0.6.
  expect_distribution({.top_k = 3, .top_p = 0.6}, logits, {0, 0, 0, 4 / 14., 10 / 14.}, 10.9);
  expect_distribution({.top_k = 4, .min_p = 0.35}, logits, {0, 0, 0, 4 / 14., 10 / 14.}, 10.9);
}

TEST(Sampler, PositionsOfOneSeedAreIndependentDraws) {
  std::vector<SampleRow> rows(20000);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].seed = 3, rows[i].position = static_cast<int64_t>(i);
  const Repeated repeated({0, 0}, 20000);
  const Samples s = sample(repeated.logits, rows, kSamplerRows[0]);
  int ones = 0, changes = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    ones += s.ids[i];
    changes += i > 0 && s.ids[i] != s.ids[i - 1];
  }
  // Both are binomial with deviation 71: within four of them.
  EXPECT_NEAR(ones, 10000, 283);
  EXPECT_NEAR(changes, 10000, 283);
}

TEST(Sampler, GreedyTiesGoToTheLowerId) {
  std::vector<float> logits(1003, 0.0f);
  logits[700] = logits[900] = logits[1002] = 5;
  const Repeated repeated(logits, 1);
  for (const Row<SamplerArgs>& row : kSamplerRows) {
    EXPECT_EQ(sample(repeated.logits, {{.temperature = 0}}, row).ids[0], 700);
    EXPECT_EQ(sample(repeated.logits, {{.top_k = 1}}, row).ids[0], 700);
  }
}

TEST(Sampler, LogprobsAreOfTheLogitsAsGiven) {
  const Repeated repeated({std::log(1.0f), std::log(3.0f), std::log(4.0f)}, 1);
  const std::vector<LogitBias> bias = {{0, 50}};
  for (const Row<SamplerArgs>& row : kSamplerRows) {
    const Samples s = sample(repeated.logits, {{.temperature = 0, .logit_bias = bias}}, row);
    EXPECT_EQ(s.ids[0], 0);
    EXPECT_NEAR(s.logprobs[0], std::log(1 / 8.0), 1e-6);
    const Samples cold = sample(repeated.logits, {{.temperature = 0.01}}, row);
    EXPECT_EQ(cold.ids[0], 2);
    EXPECT_NEAR(cold.logprobs[0], std::log(0.5), 1e-6);
  }
}

TEST(Sampler, TopLogprobsBreakTiesByIdAndPadTheRest) {
  const Repeated repeated({1, 2, 2, 0, 2}, 2);
  const std::vector<SampleRow> rows = {{.temperature = 0, .top_logprobs = 3},
                                       {.temperature = 0, .top_logprobs = 1}};
  for (const Row<SamplerArgs>& row : kSamplerRows) {
    Guarded ids(DType::i32, {2}), valid(DType::u8, {2}), top_ids(DType::i32, {2, 7}), top(DType::f32, {2, 7});
    SamplerArgs args{.logits = repeated.logits,
                     .rows = rows,
                     .ids = ids,
                     .valid = valid,
                     .top_ids = top_ids,
                     .top_logprobs = top};
    std::vector<uint8_t> memory(*sampler_workspace_bytes(args, Stream{}));
    args.workspace = Tensor(memory.data(), DType::u8, {static_cast<int64_t>(memory.size())});
    ASSERT_OK(row.run(args, Stream{}));
    EXPECT_EQ(list_of<int32_t>(top_ids),
              (std::vector<int32_t>{1, 2, 4, -1, -1, -1, -1, 1, -1, -1, -1, -1, -1, -1}));
    EXPECT_EQ(top.as<float>()[3], -INFINITY);
    EXPECT_EQ(top.as<float>()[0], top.as<float>()[2]);
  }
}

TEST(Sampler, BannedAndNotAllowedTokensNeverCome) {
  const std::vector<int32_t> banned = {4, 4, -1, 99};
  const std::vector<uint32_t> allowed = {0b11010};
  expect_distribution({.banned_ids = banned}, {0, 0, 0, 0, 9}, {0.25, 0.25, 0.25, 0.25, 0}, 16.3);
  expect_distribution({.banned_ids = banned, .allowed_bits = allowed}, {9, 0, 9, 0, 9}, {0, 0.5, 0, 0.5, 0},
                      10.9);
  // Nothing left: flagged, not drawn.
  const std::vector<uint32_t> none = {0};
  const Repeated repeated({1, 2, 3}, 1);
  for (const Row<SamplerArgs>& row : kSamplerRows) {
    const Samples s = sample(repeated.logits, {{.allowed_bits = none}}, row);
    EXPECT_EQ(s.valid[0], 0);
    EXPECT_EQ(s.ids[0], 0);
  }
}

// https://github.com/flashinfer-ai/flashinfer/issues/2402: a row of NaN found no token and killed the whole batch.
TEST(Sampler, H23NanRowsAreFlaggedAndOthersServed) {
  constexpr int64_t kVocab = 1003;
  std::vector<float> logits(4 * kVocab, 0.0f);
  const auto one_hot = [&](int64_t row, int64_t id) {
    std::fill_n(logits.begin() + row * kVocab, kVocab, -INFINITY);
    logits[row * kVocab + id] = 0;
  };
  one_hot(0, 7);
  std::fill_n(logits.begin() + kVocab, kVocab, NAN);
  logits[2 * kVocab + 500] = NAN;
  one_hot(3, 1002);
  const Tensor tensor(logits.data(), DType::f32, {4, kVocab});
  for (const SampleRow& params : {SampleRow{.top_k = 50, .top_p = 0.9, .min_p = 0.05}, SampleRow{.top_k = 50},
                                  SampleRow{.top_p = 0.9}, SampleRow{.min_p = 0.05}, SampleRow{},
                                  SampleRow{.temperature = 0}, SampleRow{.repetition_penalty = 2}}) {
    for (const Row<SamplerArgs>& row : kSamplerRows) {
      SCOPED_TRACE(row.name);
      const Samples s = sample(tensor, std::vector<SampleRow>(4, params), row);
      EXPECT_EQ(s.ids[0], 7);
      EXPECT_EQ(s.ids[3], 1002);
      EXPECT_EQ(s.valid, (std::vector<uint8_t>{1, 0, 0, 1}));
      for (int32_t id : s.ids) EXPECT_TRUE(id >= 0 && id < kVocab);
      EXPECT_EQ(s.logprobs[0], 0);
      EXPECT_EQ(s.logprobs[1], -INFINITY);
    }
  }
}

TEST(Sampler, InfiniteLogits) {
  for (const Row<SamplerArgs>& row : kSamplerRows) {
    SCOPED_TRACE(row.name);
    const Repeated none({-INFINITY, -INFINITY, -INFINITY}, 1);
    EXPECT_EQ(sample(none.logits, {{}}, row).valid[0], 0);
    // Tokens at infinity share the probability.
    const Repeated two({1, INFINITY, 0, INFINITY}, 64);
    for (const SampleRow& params :
         {SampleRow{}, SampleRow{.top_k = 3, .top_p = 0.99, .min_p = 0.1}, SampleRow{.top_p = 0.99}}) {
      std::vector<SampleRow> rows(64, params);
      for (int i = 0; i < 64; ++i) rows[i].seed = i;
      const Samples s = sample(two.logits, rows, row);
      const std::set<int32_t> drawn(s.ids.begin(), s.ids.end());
      EXPECT_EQ(drawn, (std::set<int32_t>{1, 3}));
      EXPECT_NEAR(s.logprobs[0], std::log(0.5), 1e-6);
    }
  }
}

// https://github.com/vllm-project/vllm/issues/3063: temperatures of 1e-5 overflow the logits and the answer is blank.
TEST(Sampler, H24TinyTemperatures) {
  std::vector<float> values(16, 0.0f);
  values[0] = 30, values[1] = 29, values[2] = -30;
  std::vector<uint16_t> halves;
  for (float v : values) halves.push_back(f32_to_bf16(v));
  for (const Tensor& logits :
       {Tensor(values.data(), DType::f32, {1, 16}), Tensor(halves.data(), DType::bf16, {1, 16})}) {
    for (double temperature : {1e-3, 1e-4, 1e-5, 1e-6, 1e-38, 1e-300, 5e-324, 0.0}) {
      for (const Row<SamplerArgs>& row : kSamplerRows) {
        for (const SampleRow& filters : {SampleRow{}, SampleRow{.top_k = 5, .top_p = 0.9},
                                         SampleRow{.top_p = 0.9}, SampleRow{.min_p = 0.1}}) {
          for (uint64_t seed = 0; seed < 20; ++seed) {
            SampleRow params = filters;
            params.temperature = temperature;
            params.seed = seed;
            const Samples s = sample(logits, {params}, row);
            ASSERT_EQ(s.ids[0], 0) << temperature << " " << row.name;
            ASSERT_EQ(s.valid[0], 1);
          }
        }
      }
    }
  }
  // At 1 both of the first are drawn; enormous temperatures are the uniform distribution.
  expect_distribution({.temperature = 1}, {30, 29}, {0.7310586, 0.2689414}, 10.9);
  expect_distribution({.temperature = 1e300}, {30, 29, -30, -INFINITY}, {1 / 3., 1 / 3., 1 / 3., 0}, 13.9);
  expect_distribution({.temperature = 1e300, .top_p = 0.5}, {30, 29, -30, -INFINITY}, {0.5, 0.5, 0, 0}, 10.9);
}

// https://github.com/vllm-project/vllm/pull/50979: one top-k path kept all tokens tied with the k-th.
TEST(Sampler, H25ExactlyKWithTies) {
  const std::vector<float> logits = {5, 4, 4, 4, 4, 1, 1, 1, 1, 1};
  expect_distribution({.top_k = 2}, logits, {0.7310586, 0.2689414, 0, 0, 0, 0, 0, 0, 0, 0}, 10.9);
  for (const Row<SamplerArgs>& row : kSamplerRows) {
    for (uint64_t seed = 0; seed < 1000; ++seed) {
      const SampleRow params{.top_k = 2, .seed = seed};
      const int32_t alone = sample(Repeated(logits, 1).logits, {params}, row).ids[0];
      std::vector<SampleRow> batch(9);
      for (uint64_t i = 0; i < 9; ++i) batch[i] = {.top_k = static_cast<int32_t>(i), .seed = 77 + i};
      batch[seed % 9] = params;
      ASSERT_EQ(sample(Repeated(logits, 9).logits, batch, row).ids[seed % 9], alone);
      ASSERT_LT(alone, 2);
    }
  }
}

TEST(Sampler, TopPTiesGoToTheLowerId) {
  expect_distribution({.top_p = 0.5}, {1, 1, 1, 1}, {0.5, 0.5, 0, 0}, 10.9);
}

// https://github.com/NVIDIA/TensorRT-LLM/pull/5623: presence and frequency counted prompt tokens.
TEST(Sampler, H26Penalties) {
  std::vector<float> logits(8, 2.0f);
  logits[7] = -2;
  const std::vector<int32_t> prompt = {3, 3, 3, 5}, output = {5, 6, 6, 7};
  struct Expect {
    SampleRow params;
    std::vector<double> logits;
  };
  const Expect cases[] = {
      {{.presence_penalty = 0.25, .frequency_penalty = 0.5}, {2, 2, 2, 2, 2, 1.25, 0.75, -2.75}},
      {{.repetition_penalty = 2}, {2, 2, 2, 1, 2, 1, 1, -4}},
      // Repetition comes first: (2 / 2) - 0.25 - 0.5 for token 5.
      {{.repetition_penalty = 2, .presence_penalty = 0.25, .frequency_penalty = 0.5},
       {2, 2, 2, 1, 2, 0.25, -0.25, -4.75}},
  };
  for (const Expect& e : cases) {
    // The penalised logits show in the frequencies of a draw.
    SampleRow params = e.params;
    params.prompt_ids = prompt;
    params.output_ids = output;
    std::vector<double> probability;
    double sum = 0;
    for (double l : e.logits) sum += std::exp(l);
    for (double l : e.logits) probability.push_back(std::exp(l) / sum);
    expect_distribution(params, logits, probability, 24.3);
    // And exactly: a bias that makes two tokens equal decides a greedy tie for the lower id, and the next number
    // above it does not.
    for (int32_t id = 1; id < 8; ++id) {
      for (const Row<SamplerArgs>& row : kSamplerRows) {
        SampleRow greedy = params;
        greedy.temperature = 0;
        const std::vector<int32_t> others = [&] {
          std::vector<int32_t> list;
          for (int32_t i = 1; i < 8; ++i)
            if (i != id) list.push_back(i);
          return list;
        }();
        greedy.banned_ids = others;
        const float equal = static_cast<float>(e.logits[id] - 2);
        std::vector<LogitBias> bias = {{0, equal}};
        greedy.logit_bias = bias;
        EXPECT_EQ(sample(Repeated(logits, 1).logits, {greedy}, row).ids[0], 0) << id;
        bias[0].bias = equal - 0x1p-10f;
        EXPECT_EQ(sample(Repeated(logits, 1).logits, {greedy}, row).ids[0], id) << id;
      }
    }
  }
}

// https://github.com/vllm-project/vllm/issues/51226: a seed worked only when all requests of the batch had one.
TEST(Sampler, H27TheDrawDependsOnSeedAndPositionOnly) {
  constexpr int64_t kVocab = 200;
  std::mt19937 rng(8);
  std::vector<std::vector<float>> steps(32, std::vector<float>(kVocab));
  std::normal_distribution<float> normal(0, 2);
  for (auto& step : steps)
    for (float& l : step) l = normal(rng);
  for (const Row<SamplerArgs>& row : kSamplerRows) {
    SCOPED_TRACE(row.name);
    const auto run = [&](int company, int slot) {
      std::vector<int32_t> tokens;
      for (int64_t p = 0; p < 32; ++p) {
        std::vector<SampleRow> rows(company + 1);
        for (SampleRow& other : rows) {
          other = {.temperature = rng() % 3 * 0.5,
                   .top_k = static_cast<int32_t>(rng() % 5),
                   .seed = rng(),
                   .position = static_cast<int64_t>(rng() % 100)};
        }
        rows[slot] = {.seed = 11, .position = p};
        tokens.push_back(
            sample(Repeated(steps[p], company + 1).logits, rows, row, cpu_streams()[1]).ids[slot]);
      }
      return tokens;
    };
    const std::vector<int32_t> alone = run(0, 0);
    EXPECT_EQ(run(1, 0), alone);
    EXPECT_EQ(run(7, 3), alone);
    EXPECT_EQ(run(7, 7), alone);
    EXPECT_GT(std::set<int32_t>(alone.begin(), alone.end()).size(), 10u);
    // Twice in one batch.
    const Samples twice = sample(Repeated(steps[0], 2).logits, {{.seed = 11}, {.seed = 11}}, row);
    EXPECT_EQ(twice.ids[0], twice.ids[1]);
  }
}

TEST(Sampler, ManyRandomRowsAgreeWithTheReference) {
  std::mt19937 rng(12);
  for (int round = 0; round < 300; ++round) {
    // Few distinct values: ties everywhere.
    const int64_t vocab = 1 + static_cast<int64_t>(rng() % 700);
    const int levels = 1 + static_cast<int>(rng() % 12);
    std::vector<float> logits(vocab);
    for (float& l : logits)
      l = 0.5f * static_cast<float>(rng() % levels) + (rng() % 50 == 0 ? -INFINITY : 0.0f);
    logits[rng() % vocab] = 1;
    const auto one_of = [&](auto... values) {
      const double list[] = {static_cast<double>(values)...};
      return list[rng() % std::size(list)];
    };
    std::vector<SampleRow> rows(4);
    for (SampleRow& row : rows) {
      row = {.temperature = one_of(0, 0.3, 1, 2),
             .top_k = static_cast<int32_t>(one_of(0, 1, 2, 7, 100, 650)),
             .top_p = one_of(1, 0.97, 0.513, 0.117),
             .min_p = one_of(0, 0.021, 0.37),
             .seed = rng()};
    }
    const Repeated repeated(logits, 4);
    const Samples got = sample(repeated.logits, rows, kSamplerRows[0]);
    const Samples want = sample(repeated.logits, rows, kSamplerRows[std::size(kSamplerRows) - 1]);
    ASSERT_EQ(got.ids, want.ids) << "round " << round << ", vocab " << vocab;
  }
}

TEST(Sampler, TwoStreamsAtOnceWithTheirOwnScratch) {
  SamplerProblem a({"", 6, 5000, DType::f32, 4, 0.8, 50, 0.9, 0, true, 5}, 3),
      b({"", 6, 5000, DType::f32, 2, 1, 0, 0.9}, 4);
  SamplerProblem a_alone({"", 6, 5000, DType::f32, 4, 0.8, 50, 0.9, 0, true, 5}, 3),
      b_alone({"", 6, 5000, DType::f32, 2, 1, 0, 0.9}, 4);
  std::thread other([&] { EXPECT_OK(sampler(b.args, Stream{})); });
  EXPECT_OK(sampler(a.args, Stream{}));
  other.join();
  ASSERT_OK(sampler(a_alone.args, Stream{}));
  ASSERT_OK(sampler(b_alone.args, Stream{}));
  EXPECT_EQ(list_of<int32_t>(a.ids), list_of<int32_t>(a_alone.ids));
  EXPECT_EQ(list_of<int32_t>(b.ids), list_of<int32_t>(b_alone.ids));
}

TEST(Sampler, RefusesWhatDisagrees) {
  SamplerProblem p({"", 2, 40, DType::f32, 4, 1, 0, 1, 0, false, 3}, 1);
  const auto refuses = [&](auto&& change, const char* text) {
    std::vector<SampleRow> rows = p.rows;
    SamplerArgs args = p.args;
    change(rows[1], args);
    args.rows = rows;
    EXPECT_FAILS(sampler(args, Stream{}), Code::invalid_argument, text);
  };
  refuses([](SampleRow& r, auto&) { r.temperature = -1; },
          "sampler: rows[1]: temperature is -1, needs a finite number >= 0");
  refuses([](SampleRow& r, auto&) { r.temperature = NAN; }, "temperature is nan");
  refuses([](SampleRow& r, auto&) { r.temperature = INFINITY; }, "temperature is inf");
  refuses([](SampleRow& r, auto&) { r.top_k = -1; }, "top_k is -1, needs 0 (all) or more");
  refuses([](SampleRow& r, auto&) { r.top_p = 0; }, "top_p is 0, needs a number above 0 and at most 1");
  refuses([](SampleRow& r, auto&) { r.top_p = 1.5; }, "top_p is 1.5");
  refuses([](SampleRow& r, auto&) { r.min_p = NAN; }, "min_p is nan, needs a number from 0 to 1");
  refuses([](SampleRow& r, auto&) { r.repetition_penalty = 0; },
          "repetition_penalty is 0, needs a finite number above 0");
  refuses([](SampleRow& r, auto&) { r.presence_penalty = INFINITY; }, "presence_penalty is inf");
  refuses([](SampleRow& r, auto&) { r.top_logprobs = 5; }, "rows[1].top_logprobs is 5, needs at most 4");
  const std::vector<LogitBias> bias = {{3, NAN}};
  refuses([&](SampleRow& r, auto&) { r.logit_bias = bias; }, "logit_bias of id 3 is nan");
  const std::vector<uint32_t> bits = {1};
  refuses([&](SampleRow& r, auto&) { r.allowed_bits = bits; },
          "allowed_bits has 1 words, needs 2 for vocab = 40");
  refuses([](SampleRow&, SamplerArgs& a) { a.ids.shape[0] = 3; }, "ids.shape[0] is 3, needs rows = 2");
  refuses([](SampleRow&, SamplerArgs& a) { a.top_ids = Tensor(); }, "needs both or neither");
  refuses([](SampleRow&, SamplerArgs& a) { a.logits.shape[1] = 0; },
          "logits.shape[1] is 0, needs 1 to 2^31 - 1");
  refuses([](SampleRow&, SamplerArgs& a) { a.workspace.shape[0] = 8; },
          "workspace.shape[0] is 8, needs at least");
  EXPECT_FAILS(sampler_workspace_bytes(p.args, Stream{.device = Device::cuda}).status(), Code::unsupported,
               "reference: runs on cpu");
  SamplerProblem none({"", 0, 40}, 1);
  EXPECT_OK(sampler(none.args, Stream{}));
}

}  // namespace
}  // namespace vivace
