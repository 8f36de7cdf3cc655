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
        EXPECT_EQ(list_of<int32_t>(got.args.output_counts), list_of<int32_t>(want.args.output_counts));
        for (const Guarded* g :
             {&got.ids, &got.valid, &got.workspace, &got.tensors.output_counts, &got.top_ids}) {
          EXPECT_TRUE(g->canaries_intact());
        }
        EXPECT_EQ(std::memcmp(got.logits.as<void>(), want.logits.as<void>(), want.logits.bytes()), 0);
      });
    }
  }
}

/// What a call with these rows over these logits gives.
struct Samples {
  std::vector<int32_t> ids;
  std::vector<uint8_t> valid;
  std::vector<float> logprobs;
};

/// Logits of rows, in f32 or bf16: one row for all when there is one.
struct Logits {
  std::vector<std::vector<float>> rows;
  DType dtype = DType::f32;
};
Logits same(std::vector<float> row, DType dtype = DType::f32) {
  return {{std::move(row)}, dtype};
}

/// A call's memory; made where the row under test runs.
struct Call {
  Guarded logits, ids, valid, logprobs;
  SamplerArgs args;
  SampleTensors tensors;

  Call(const Logits& from, const std::vector<SampleSpec>& specs) {
    const auto count = static_cast<int64_t>(specs.size()), vocab = static_cast<int64_t>(from.rows[0].size());
    const auto given = static_cast<int64_t>(from.rows.size());
    logits = Guarded(from.dtype, {given, vocab});
    for (int64_t r = 0; r < given; ++r) {
      for (int64_t i = 0; i < vocab; ++i) store(from.dtype, logits.tensor().at(r).data, i, from.rows[r][i]);
    }
    args.logits = logits;
    args.logits.shape[0] = count;
    if (given == 1) args.logits.stride[0] = 0;
    args.ids = ids = Guarded(DType::i32, {count});
    args.valid = valid = Guarded(DType::u8, {count});
    args.logprobs = logprobs = Guarded(DType::f32, {count});
    tensors = SampleTensors(specs, vocab, args);
  }
  Samples samples() const {
    return {list_of<int32_t>(args.ids), list_of<uint8_t>(args.valid), list_of<float>(args.logprobs)};
  }
};

/// Calls body(sample) for each row of the table, where sample(logits, rows) runs it.
template <class Body>
void with_each_row(Body&& body, const std::vector<Stream>& streams = test_streams()) {
  const Call shape(same({0}), {{}});
  for (const Stream& stream : streams) {
    for_each_fitting_row(kSampler, shape.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      body([&](const Logits& logits, const std::vector<SampleSpec>& specs) {
        Call call(logits, specs);
        Guarded scratch;
        if (stream.device == Device::cpu && row.row.workspace_bytes != nullptr) {
          scratch = Guarded(DType::u8, {row.row.workspace_bytes(call.args, stream)});
          call.args.workspace = scratch;
        }
        EXPECT_OK(row.run(call.args, stream));
        EXPECT_TRUE(scratch.canaries_intact());
        return call.samples();
      });
    });
  }
}

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
void expect_distribution(const SampleSpec& params, const std::vector<float>& logits,
                         const std::vector<double>& want, double limit) {
  constexpr int kDraws = 20000;
  std::vector<SampleSpec> rows(kDraws, params);
  for (int i = 0; i < kDraws; ++i) rows[i].seed = 1000 + i;
  with_each_row([&](const auto& sample) {
    std::map<int32_t, int> count;
    for (int32_t id : sample(same(logits), rows).ids) ++count[id];
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
  });
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
  std::vector<SampleSpec> rows(20000);
  for (size_t i = 0; i < rows.size(); ++i) rows[i].seed = 3, rows[i].position = static_cast<int64_t>(i);
  with_each_row([&](const auto& sample) {
    const Samples s = sample(same({0, 0}), rows);
    int ones = 0, changes = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      ones += s.ids[i];
      changes += i > 0 && s.ids[i] != s.ids[i - 1];
    }
    // Both are binomial with deviation 71: within four of them.
    EXPECT_NEAR(ones, 10000, 283);
    EXPECT_NEAR(changes, 10000, 283);
  });
}

TEST(Sampler, GreedyTiesGoToTheLowerId) {
  std::vector<float> logits(1003, 0.0f);
  logits[700] = logits[900] = logits[1002] = 5;
  with_each_row([&](const auto& sample) {
    EXPECT_EQ(sample(same(logits), {{.temperature = 0}}).ids[0], 700);
    EXPECT_EQ(sample(same(logits), {{.top_k = 1}}).ids[0], 700);
  });
}

TEST(Sampler, LogprobsAreOfTheLogitsAsGiven) {
  const Logits logits = same({std::log(1.0f), std::log(3.0f), std::log(4.0f)});
  with_each_row([&](const auto& sample) {
    const Samples s = sample(logits, {{.temperature = 0, .logit_bias = {{0, 50.f}}}});
    EXPECT_EQ(s.ids[0], 0);
    EXPECT_NEAR(s.logprobs[0], std::log(1 / 8.0), 1e-6);
    const Samples cold = sample(logits, {{.temperature = 0.01}});
    EXPECT_EQ(cold.ids[0], 2);
    EXPECT_NEAR(cold.logprobs[0], std::log(0.5), 1e-6);
  });
}

TEST(Sampler, TopLogprobsBreakTiesByIdAndPadTheRest) {
  const Call shape(same({0}), {{}});
  for (const Stream& stream : test_streams()) {
    for_each_fitting_row(kSampler, shape.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      Call call(same({1, 2, 2, -INFINITY, 2}), {{.temperature = 0}, {.temperature = 0}});
      Guarded top_ids(DType::i32, {2, 7}), top(DType::f32, {2, 7});
      call.args.top_ids = top_ids;
      call.args.top_logprobs = top;
      const Result<int64_t> bytes = sampler_workspace_bytes(call.args, stream);
      ASSERT_TRUE(bytes.ok());
      Guarded scratch(DType::u8, {*bytes});
      call.args.workspace = scratch;
      ASSERT_OK(row.run(call.args, stream));
      EXPECT_EQ(list_of<int32_t>(top_ids),
                (std::vector<int32_t>{1, 2, 4, 0, 3, -1, -1, 1, 2, 4, 0, 3, -1, -1}));
      const float* logprobs = top.as<float>();
      EXPECT_EQ(logprobs[0], logprobs[2]);
      EXPECT_NEAR(logprobs[3], logprobs[0] - 1, 1e-6);
      EXPECT_EQ(logprobs[4], -INFINITY);
      EXPECT_EQ(logprobs[5], -INFINITY);
    });
  }
}

TEST(Sampler, BannedAndNotAllowedTokensNeverCome) {
  const std::vector<int32_t> banned = {4, 4, -1, 99};
  expect_distribution({.banned_ids = banned}, {0, 0, 0, 0, 9}, {0.25, 0.25, 0.25, 0.25, 0}, 16.3);
  expect_distribution({.banned_ids = banned}, {0, 0, 0, 0, INFINITY}, {0.25, 0.25, 0.25, 0.25, 0}, 16.3);
  expect_distribution({.banned_ids = banned, .allowed_bits = {0b11010}}, {9, 0, 9, 0, 9}, {0, 0.5, 0, 0.5, 0},
                      10.9);
  // Nothing left: flagged, not drawn.
  with_each_row([&](const auto& sample) {
    const Samples s = sample(same({1, 2, 3}), {{.allowed_bits = {0}}});
    EXPECT_EQ(s.valid[0], 0);
    EXPECT_EQ(s.ids[0], 0);
  });
}

TEST(Sampler, CountsWhatItDraws) {
  const Call shape(same({0}), {{}});
  for (const Stream& stream : test_streams()) {
    for_each_fitting_row(kSampler, shape.args, stream, [&](const auto& row) {
      SCOPED_TRACE(row.name);
      // The third row is not valid, the last has no state.
      const SampleSpec greedy{.temperature = 0, .output_ids = {1, 1}};
      Call call({{{0, 5, 1}, {9, 5, 1}, {NAN, 5, 1}, {0, 1, 2}}, DType::f32},
                {greedy, greedy, greedy, {.temperature = 0}});
      call.args.count_ids = true;
      const Result<int64_t> bytes = sampler_workspace_bytes(call.args, stream);
      ASSERT_TRUE(bytes.ok());
      Guarded scratch(DType::u8, {*bytes});
      call.args.workspace = scratch;
      ASSERT_OK(row.run(call.args, stream));
      const auto counts = [&](int64_t state) {
        const int32_t* list = call.args.output_counts.at(state).as<int32_t>();
        return std::vector<int32_t>(list, list + 3);
      };
      EXPECT_EQ(counts(4), (std::vector<int32_t>{0, 3, 0}));
      EXPECT_EQ(counts(3), (std::vector<int32_t>{1, 2, 0}));
      EXPECT_EQ(counts(2), (std::vector<int32_t>{0, 2, 0}));
      EXPECT_EQ(counts(1), (std::vector<int32_t>{0, 0, 0}));
    });
  }
}

// https://github.com/flashinfer-ai/flashinfer/issues/2402: a row of NaN found no token and killed the whole batch.
TEST(Sampler, H23NanRowsAreFlaggedAndOthersServed) {
  constexpr int64_t kVocab = 1003;
  Logits logits{std::vector<std::vector<float>>(4, std::vector<float>(kVocab, 0.0f)), DType::f32};
  const auto one_hot = [&](int64_t row, int64_t id) {
    std::fill(logits.rows[row].begin(), logits.rows[row].end(), -INFINITY);
    logits.rows[row][id] = 0;
  };
  one_hot(0, 7);
  std::fill(logits.rows[1].begin(), logits.rows[1].end(), NAN);
  logits.rows[2][500] = NAN;
  one_hot(3, 1002);
  for (const SampleSpec& params :
       {SampleSpec{.top_k = 50, .top_p = 0.9, .min_p = 0.05}, SampleSpec{.top_k = 50},
        SampleSpec{.top_p = 0.9}, SampleSpec{.min_p = 0.05}, SampleSpec{}, SampleSpec{.temperature = 0},
        SampleSpec{.repetition_penalty = 2, .prompt_ids = {7}}}) {
    with_each_row([&](const auto& sample) {
      const Samples s = sample(logits, std::vector<SampleSpec>(4, params));
      EXPECT_EQ(s.ids[0], 7);
      EXPECT_EQ(s.ids[3], 1002);
      EXPECT_EQ(s.valid, (std::vector<uint8_t>{1, 0, 0, 1}));
      for (int32_t id : s.ids) EXPECT_TRUE(id >= 0 && id < kVocab);
      EXPECT_EQ(s.logprobs[0], 0);
      EXPECT_EQ(s.logprobs[1], -INFINITY);
    });
  }
}

TEST(Sampler, InfiniteLogits) {
  with_each_row([&](const auto& sample) {
    EXPECT_EQ(sample(same({-INFINITY, -INFINITY, -INFINITY}), {{}}).valid[0], 0);
    // Tokens at infinity share the probability.
    for (const SampleSpec& params :
         {SampleSpec{}, SampleSpec{.top_k = 3, .top_p = 0.99, .min_p = 0.1}, SampleSpec{.top_p = 0.99}}) {
      std::vector<SampleSpec> rows(64, params);
      for (int i = 0; i < 64; ++i) rows[i].seed = i;
      const Samples s = sample(same({1, INFINITY, 0, INFINITY}), rows);
      const std::set<int32_t> drawn(s.ids.begin(), s.ids.end());
      EXPECT_EQ(drawn, (std::set<int32_t>{1, 3}));
      EXPECT_NEAR(s.logprobs[0], std::log(0.5), 1e-6);
    }
  });
}

// https://github.com/vllm-project/vllm/issues/3063: temperatures of 1e-5 overflow the logits and the answer is blank.
TEST(Sampler, H24TinyTemperatures) {
  std::vector<float> values(16, 0.0f);
  values[0] = 30, values[1] = 29, values[2] = -30;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    std::vector<SampleSpec> rows;
    for (double temperature : {1e-3, 1e-4, 1e-5, 1e-6, 1e-38, 1e-44, 0.0}) {
      for (const SampleSpec& filters : {SampleSpec{}, SampleSpec{.top_k = 5, .top_p = 0.9},
                                        SampleSpec{.top_p = 0.9}, SampleSpec{.min_p = 0.1}}) {
        for (uint64_t seed = 0; seed < 20; ++seed) {
          rows.push_back(filters);
          rows.back().temperature = temperature;
          rows.back().seed = seed;
        }
      }
    }
    with_each_row([&](const auto& sample) {
      const Samples s = sample(same(values, dtype), rows);
      EXPECT_EQ(s.ids, std::vector<int32_t>(rows.size(), 0));
      EXPECT_EQ(s.valid, std::vector<uint8_t>(rows.size(), 1));
    });
  }
  // At 1 both of the first are drawn; enormous temperatures are the uniform distribution.
  expect_distribution({.temperature = 1}, {30, 29}, {0.7310586, 0.2689414}, 10.9);
  expect_distribution({.temperature = 3e38}, {30, 29, -30, -INFINITY}, {1 / 3., 1 / 3., 1 / 3., 0}, 13.9);
  expect_distribution({.temperature = 3e38, .top_p = 0.5}, {30, 29, -30, -INFINITY}, {0.5, 0.5, 0, 0}, 10.9);
}

// https://github.com/vllm-project/vllm/pull/50979: one top-k path kept all tokens tied with the k-th.
TEST(Sampler, H25ExactlyKWithTies) {
  const std::vector<float> logits = {5, 4, 4, 4, 4, 1, 1, 1, 1, 1};
  expect_distribution({.top_k = 2}, logits, {0.7310586, 0.2689414, 0, 0, 0, 0, 0, 0, 0, 0}, 10.9);
  with_each_row([&](const auto& sample) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
      const SampleSpec params{.top_k = 2, .seed = seed};
      const int32_t alone = sample(same(logits), {params}).ids[0];
      std::vector<SampleSpec> batch(9);
      for (uint64_t i = 0; i < 9; ++i) batch[i] = {.top_k = static_cast<int32_t>(i), .seed = 77 + i};
      batch[seed % 9] = params;
      ASSERT_EQ(sample(same(logits), batch).ids[seed % 9], alone);
      ASSERT_LT(alone, 2);
    }
  });
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
    SampleSpec params;
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
    SampleSpec params = e.params;
    params.prompt_ids = prompt;
    params.output_ids = output;
    std::vector<double> probability;
    double sum = 0;
    for (double l : e.logits) sum += std::exp(l);
    for (double l : e.logits) probability.push_back(std::exp(l) / sum);
    expect_distribution(params, logits, probability, 24.3);
    // And exactly: a bias that makes two tokens equal decides a greedy tie for the lower id, and the next number
    // above it does not.
    with_each_row([&](const auto& sample) {
      for (int32_t id = 1; id < 8; ++id) {
        SampleSpec greedy = params;
        greedy.temperature = 0;
        for (int32_t i = 1; i < 8; ++i) {
          if (i != id) greedy.banned_ids.push_back(i);
        }
        const float equal = static_cast<float>(e.logits[id] - 2);
        greedy.logit_bias = {{0, equal}};
        EXPECT_EQ(sample(same(logits), {greedy}).ids[0], 0) << id;
        greedy.logit_bias = {{0, equal - 0x1p-10f}};
        EXPECT_EQ(sample(same(logits), {greedy}).ids[0], id) << id;
      }
    });
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
  with_each_row([&](const auto& sample) {
    const auto run = [&](int company, int slot) {
      std::vector<int32_t> tokens;
      for (int64_t p = 0; p < 32; ++p) {
        std::vector<SampleSpec> rows(company + 1);
        for (SampleSpec& other : rows) {
          other = {.temperature = rng() % 3 * 0.5,
                   .top_k = static_cast<int32_t>(rng() % 5),
                   .seed = rng(),
                   .position = static_cast<int64_t>(rng() % 100)};
        }
        rows[slot] = {.seed = 11, .position = p};
        tokens.push_back(sample(same(steps[p]), rows).ids[slot]);
      }
      return tokens;
    };
    const std::vector<int32_t> alone = run(0, 0);
    EXPECT_EQ(run(1, 0), alone);
    EXPECT_EQ(run(7, 3), alone);
    EXPECT_EQ(run(7, 7), alone);
    EXPECT_GT(std::set<int32_t>(alone.begin(), alone.end()).size(), 10u);
    // Twice in one batch.
    const Samples twice = sample(same(steps[0]), {{.seed = 11}, {.seed = 11}});
    EXPECT_EQ(twice.ids[0], twice.ids[1]);
  });
}

// A GPU gives a row more blocks when rows are few; sums and notes must not show it.
TEST(Sampler, ARowHasTheSameBitsInABatchOfAnySize) {
  constexpr int64_t kRows = 200, kVocab = 66000;
  std::mt19937 rng(13);
  std::normal_distribution<float> normal(0, 3);
  Logits logits{std::vector(kRows, std::vector<float>(kVocab)), DType::bf16};
  std::vector<SampleSpec> specs(kRows);
  for (int64_t r = 0; r < kRows; ++r) {
    for (float& l : logits.rows[r]) l = normal(rng);
    SampleSpec& spec = specs[r];
    spec.seed = rng();
    if (r % 4 == 1) spec.top_k = 20, spec.top_p = 0.9;
    if (r % 4 == 2)
      spec.top_p = 0.8, spec.repetition_penalty = 1.3, spec.prompt_ids = {5, 65999}, spec.output_ids = {7};
    if (r % 4 == 3) spec.temperature = 0;
  }
  with_each_row([&](const auto& sample) {
    const Samples all = sample(logits, specs);
    for (const int64_t count : {1, 40}) {
      for (int64_t first = 0; first < 4; ++first) {
        const int64_t at = first * 47;
        const Logits part{{logits.rows.begin() + at, logits.rows.begin() + at + count}, logits.dtype};
        const Samples few = sample(part, {specs.begin() + at, specs.begin() + at + count});
        for (int64_t r = 0; r < count; ++r) {
          ASSERT_EQ(few.ids[r], all.ids[at + r]) << count << " rows from " << at;
          ASSERT_EQ(few.logprobs[r], all.logprobs[at + r]) << count << " rows from " << at;
        }
      }
    }
  });
}

TEST(Sampler, ManyRandomRowsAgreeWithTheReference) {
  std::mt19937 rng(12);
  for (int round = 0; round < 300; ++round) {
    // Few distinct values: ties everywhere.
    const int64_t vocab = 1 + static_cast<int64_t>(rng() % (round % 10 == 0 ? 9000 : 700));
    const int levels = 1 + static_cast<int>(rng() % 12);
    std::vector<float> logits(vocab);
    for (float& l : logits)
      l = 0.5f * static_cast<float>(rng() % levels) + (rng() % 50 == 0 ? -INFINITY : 0.0f);
    logits[rng() % vocab] = 1;
    const auto one_of = [&](auto... values) {
      const double list[] = {static_cast<double>(values)...};
      return list[rng() % std::size(list)];
    };
    std::vector<SampleSpec> rows(4);
    for (SampleSpec& row : rows) {
      row = {.temperature = one_of(0, 0.3, 1, 2),
             .top_k = static_cast<int32_t>(one_of(0, 1, 2, 7, 100, 650)),
             .top_p = one_of(1, 0.97, 0.513, 0.117),
             .min_p = one_of(0, 0.021, 0.37),
             .seed = rng()};
    }
    Call want(same(logits), rows);
    ASSERT_OK(sampler_reference(want.args, Stream{}));
    with_each_row([&](const auto& sample) {
      ASSERT_EQ(sample(same(logits), rows).ids, want.samples().ids)
          << "round " << round << ", vocab " << vocab;
    });
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

// What the host refuses before it runs, a GPU sees only then: such rows are not valid, others are served.
TEST(Sampler, DeviceRowsFlagWhatTheHostWouldRefuse) {
  const Call shape(same({0}), {{}});
  for (const Stream& stream : test_streams()) {
    if (stream.device == Device::cpu) continue;
    for_each_fitting_row(kSampler, shape.args, stream, [&](const auto& row) {
      SampleSpec fine{.temperature = 0, .output_ids = {1}};
      std::vector<SampleSpec> specs(9, fine);
      specs[0].temperature = NAN;
      specs[1].temperature = -1;
      specs[2].top_k = -1;
      specs[3].top_p = 0;
      specs[4].min_p = 1.5;
      specs[5].repetition_penalty = 0;
      specs[6].presence_penalty = INFINITY;
      Call call(same({1, 2, 9, 3}), specs);
      call.args.state.as<int32_t>()[7] = 10;
      ASSERT_OK(row.run(call.args, stream));
      EXPECT_EQ(call.samples().valid, (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 1}));
      EXPECT_EQ(call.samples().ids, (std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 0, 2}));
    });
  }
}

TEST(Sampler, RefusesWhatDisagrees) {
  SamplerProblem p({"", 2, 40, DType::f32, 4, 1, 0, 1, 0, true, 3}, 1);
  const auto refuses = [&](auto&& change, const char* text) {
    SamplerProblem q({"", 2, 40, DType::f32, 4, 1, 0, 1, 0, true, 3}, 1);
    change(q.args);
    EXPECT_FAILS(sampler(q.args, Stream{}), Code::invalid_argument, text);
  };
  const auto second = [](float value, Tensor SamplerArgs::*field) {
    return [=](SamplerArgs& a) { (a.*field).as<float>()[1] = value; };
  };
  refuses(second(-1, &SamplerArgs::temperature),
          "sampler: rows[1]: temperature is -1, needs a finite number >= 0");
  refuses(second(NAN, &SamplerArgs::temperature), "temperature is nan");
  refuses(second(INFINITY, &SamplerArgs::temperature), "temperature is inf");
  refuses([](SamplerArgs& a) { a.top_k.as<int32_t>()[1] = -1; }, "top_k is -1, needs 0 (all) or more");
  refuses(second(0, &SamplerArgs::top_p), "top_p is 0, needs a number above 0 and at most 1");
  refuses(second(1.5, &SamplerArgs::top_p), "top_p is 1.5");
  refuses(second(NAN, &SamplerArgs::min_p), "min_p is nan, needs a number from 0 to 1");
  refuses(second(0, &SamplerArgs::repetition_penalty),
          "repetition_penalty is 0, needs a finite number above 0");
  refuses(second(INFINITY, &SamplerArgs::presence_penalty), "presence_penalty is inf");
  refuses([](SamplerArgs& a) { a.bias_values.as<float>()[6] = NAN; }, "sampler: rows[1]: the bias of id");
  refuses([](SamplerArgs& a) { a.state.as<int32_t>()[1] = 3; },
          "sampler: state[1] is 3, needs -1 (none) to 2");
  refuses([](SamplerArgs& a) { a.state = Tensor(), a.prompt_bits.shape[0] = a.output_counts.shape[0] = 1; },
          "state is absent with 1 states for 2 rows");
  refuses([](SamplerArgs& a) { a.bias_start.as<int32_t>()[1] = 11; }, "bias_start[0] is 0 and the next 11");
  refuses([](SamplerArgs& a) { a.bias_start.shape[0] = 2; }, "bias_start.shape[0] is 2, needs rows + 1 = 3");
  refuses([](SamplerArgs& a) { a.bias_ids = Tensor(); }, "needs both or neither");
  refuses([](SamplerArgs& a) { a.seed = Tensor(); }, "needs both or neither");
  refuses([](SamplerArgs& a) { a.allowed_bits.shape[1] = 1; },
          "allowed_bits.shape[1] is 1, needs words = 2 (from ceil(vocab / 32))");
  refuses([](SamplerArgs& a) { a.output_counts = Tensor(); },
          "count_ids is true and output_counts is absent");
  refuses([](SamplerArgs& a) { a.temperature.shape[0] = 3; }, "temperature.shape[0] is 3, needs rows = 2");
  refuses([](SamplerArgs& a) { a.ids.shape[0] = 3; }, "ids.shape[0] is 3, needs rows = 2");
  refuses([](SamplerArgs& a) { a.top_ids = Tensor(); }, "needs both or neither");
  refuses([](SamplerArgs& a) { a.workspace.shape[0] = 8; }, "workspace.shape[0] is 8, needs at least");
  SamplerProblem plain({"", 2, 40}, 1);
  plain.args.logits.shape[1] = 0;
  EXPECT_FAILS(sampler(plain.args, Stream{}), Code::invalid_argument,
               "logits.shape[1] is 0, needs 1 to 2^31 - 1");
  EXPECT_FAILS(sampler_workspace_bytes(p.args, Stream{.device = Device::cuda}).status(), Code::unsupported,
               "reference: runs on cpu");
  SamplerProblem none({"", 0, 40}, 1);
  EXPECT_OK(sampler(none.args, Stream{}));
}

}  // namespace
}  // namespace vivace
