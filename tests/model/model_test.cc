#include "src/model/model.h"

#include <unistd.h>

#include <cstring>
#include <map>

#include "src/core/number.h"
#include "tests/model/padded_steps.h"

namespace vivace::testing {
namespace {

TEST(TinyModels, FollowTheirReferences) {
  for (const std::string& path : {kQwen, kHy3}) {
    const nlohmann::json references = read_json(path + "/references.json");
    for (const char* router_mode : {"exact", "two_term"}) {
      SCOPED_TRACE(path + ", router " + router_mode);
      LoadedModel loaded(open_checkpoint(path), {.router_mode = router_mode}, 1200);
      ASSERT_TRUE(loaded.ok());
      EXPECT_GT(expect_references(loaded, references, {.smallest_gap = 0.02, .log_probability = 0.01}), 40);
    }
  }
}

TEST(Hy3Layouts, OuterGivesTheBitsOfPerExpert) {
  const TempFolder folder;
  write_outer_layout(kHy3, folder);
  const auto ids = random_ids(70, 512);
  const auto per_expert = logits_after(open_checkpoint(kHy3), ids);
  const auto outer = logits_after(open_checkpoint(folder.path()), ids);
  ASSERT_EQ(per_expert.size(), 512u);
  EXPECT_EQ(per_expert, outer);
}

TEST(ExpertLayouts, SeparateStacksAsInGgufGiveTheSameBits) {
  auto stacked = std::make_shared<AlteredCheckpoint>(kQwen);
  const model::ModelConfig& config = stacked->config();
  for (int64_t l = 0; l < config.layers; ++l) {
    const std::string prefix = "model.layers." + std::to_string(l) + ".mlp.experts.";
    for (const std::string part : {"gate_proj", "up_proj", "down_proj"}) {
      const auto first = stacked->tensor(prefix + "0." + part + ".weight");
      ASSERT_TRUE(first.ok());
      const Tensor stack = stacked->make(first->dtype, {config.experts, first->shape[0], first->shape[1]});
      for (int64_t e = 0; e < config.experts; ++e) {
        const std::string name = prefix + std::to_string(e) + "." + part + ".weight";
        std::memcpy(stack.at(e).data, stacked->tensor(name)->data, static_cast<size_t>(first->bytes()));
        stacked->remove(name);
      }
      stacked->replace(prefix + part, stack);
    }
  }
  const auto ids = random_ids(70, config.vocab);
  const auto separate = logits_after(open_checkpoint(kQwen), ids);
  ASSERT_FALSE(separate.empty());
  EXPECT_EQ(separate, logits_after(stacked, ids));
}

TEST(Determinism, ChunksAndDecodeStepsGiveTheBitsOfOnePrefill) {
  for (const std::string& path : {kQwen, kHy3}) {
    SCOPED_TRACE(path);
    LoadedModel loaded(open_checkpoint(path), {.deterministic = true, .max_tokens = 1024}, 1024, 2);
    ASSERT_TRUE(loaded.ok());
    const auto ids = random_ids(560, loaded.model().config().vocab);
    Conversation whole = loaded.conversation(0);
    const std::vector<float> expected = loaded.feed(whole, ids, 1024);
    for (const int64_t chunk : {16, 100, 512}) {
      Conversation parts = loaded.conversation(1);
      EXPECT_EQ(loaded.feed(parts, ids, chunk), expected) << "chunks of " << chunk;
    }
    // Decode steps from before the end of the first piece of the schedule to well behind it.
    Conversation decoded = loaded.conversation(1);
    loaded.feed(decoded, std::span(ids).first(500), 512);
    EXPECT_EQ(loaded.feed(decoded, std::span(ids).subspan(500), 1, true), expected);
  }
}

TEST(Determinism, CompanyDoesNotChangeARequest) {
  LoadedModel loaded(open_checkpoint(kQwen), {.deterministic = true}, 1024, 4, 3);
  ASSERT_TRUE(loaded.ok());
  const int64_t vocab = loaded.model().config().vocab;
  const auto ids = random_ids(600, vocab);
  Conversation alone = loaded.conversation(0);
  loaded.feed(alone, std::span(ids).first(599), 512);
  const auto expected =
      loaded.step().add(alone, std::span(ids).last(1), Rows::last, true).run(loaded.stream());

  Conversation same = loaded.conversation(1), other = loaded.conversation(2), prompt = loaded.conversation(3);
  loaded.feed(same, std::span(ids).first(599), 77);
  const auto noise = random_ids(300, vocab, 2);
  loaded.feed(other, noise, 300);
  const auto together = loaded.step()
                            .add(other, std::span(noise).first(1), Rows::last, true)
                            .add(same, std::span(ids).last(1), Rows::last, true)
                            .add(prompt, std::span(noise).first(90), Rows::none)
                            .run(loaded.stream());
  ASSERT_EQ(together.size(), 2u);
  EXPECT_EQ(together[1], expected.front());
}

TEST(Determinism, PrefillInChunksRepeatsInTheDefaultModeToo) {
  LoadedModel loaded(open_checkpoint(kHy3), {}, 512, 2, 3);
  ASSERT_TRUE(loaded.ok());
  const auto ids = random_ids(300, 512);
  Conversation whole = loaded.conversation(0), parts = loaded.conversation(1);
  EXPECT_EQ(loaded.feed(whole, ids, 512), loaded.feed(parts, ids, 37));
}

TEST(Determinism, PaddingOfDecodeStepsChangesNothing) {
  for (const std::string& path : {kQwen, kHy3}) {
    for (const bool deterministic : {false, true}) {
      for (const DType kv_dtype : {DType::f32, DType::fp8_e4m3}) {
        SCOPED_TRACE(path + (deterministic ? ", deterministic, " : ", ") + std::string(name_of(kv_dtype)));
        expect_padding_changes_nothing(path, {.kv_dtype = kv_dtype, .deterministic = deterministic});
      }
    }
  }
}

TEST(Rows, StepsThatFitNoBucketAreRefused) {
  LoadedModel loaded(open_checkpoint(kQwen), {.max_tokens = 16, .max_requests = 8}, 64);
  ASSERT_TRUE(loaded.ok());
  Conversation decoding = loaded.conversation(), chunk = loaded.conversation();
  const std::vector<int32_t> ids = {1, 2};
  StepBuilder decode = loaded.step().add(decoding, std::span(ids).first(1), Rows::last, true);
  StepBuilder prefill = loaded.step().add(chunk, ids, Rows::all);
  std::vector<float> flat(static_cast<size_t>(16 * loaded.model().config().vocab));
  const auto refused = [&](model::ForwardInput input, int64_t bucket, const char* text) {
    input.bucket = bucket;
    const Tensor logits(flat.data(), DType::f32, {std::abs(bucket), loaded.model().config().vocab});
    const Status status = loaded.model().forward(input, logits, loaded.stream());
    EXPECT_EQ(status.code(), Code::invalid_argument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  refused(decode.input(), 9, "bucket is 9, needs 1 to 8");
  refused(decode.input(), -1, "bucket is -1, needs 1 to 8");
  refused(prefill.input(), 1, "tokens of a step in a bucket is 2, needs 1 to 1");
  refused(prefill.input(), 4, "decode_requests of a step in a bucket is 0, needs 1 to 1");
  model::ForwardInput silent = decode.input();
  silent.logit_rows = {};
  refused(silent, 4, "logit rows of a step in a bucket is 0, needs 1 to 1");
}

TEST(Rows, LogitsOfAnySubsetInAnyOrder) {
  LoadedModel loaded(open_checkpoint(kQwen), {}, 64);
  ASSERT_TRUE(loaded.ok());
  const int64_t vocab = loaded.model().config().vocab;
  const auto ids = random_ids(9, vocab);
  Conversation request = loaded.conversation();
  const auto all = loaded.step().add(request, ids, Rows::all).run(loaded.stream());
  ASSERT_EQ(all.size(), 9u);

  Conversation again = loaded.conversation();
  StepBuilder builder = loaded.step().add(again, ids, Rows::none);
  const std::vector<int64_t> rows = {7, 0, 3, 3};
  model::ForwardInput input = builder.input();
  input.logit_rows = rows;
  std::vector<float> flat(rows.size() * vocab);
  const Tensor logits(flat.data(), DType::f32, {static_cast<int64_t>(rows.size()), vocab});
  ASSERT_TRUE(loaded.model().forward(input, logits, loaded.stream()).ok());
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(std::memcmp(flat.data() + i * vocab, all[rows[i]].data(), vocab * sizeof(float)), 0) << i;
  }
}

TEST(KvCache, SixteenBitTypesStayCloseToTheReferences) {
  // bf16 keeps 8 bits: the references say that bf16 arithmetic throughout moves log-probabilities by 0.004 to 0.047 on
  // average, and the cache alone may not do worse.
  const nlohmann::json references = read_json(kQwen + "/references.json");
  for (const DType kv_dtype : {DType::bf16, DType::f16}) {
    LoadedModel loaded(open_checkpoint(kQwen), {.kv_dtype = kv_dtype}, 1200);
    ASSERT_TRUE(loaded.ok());
    for (const nlohmann::json& c : references.at("cases")) {
      const auto prompt = c.at("prompt_ids").get<std::vector<int32_t>>();
      const auto greedy = c.at("greedy_ids").get<std::vector<int32_t>>();
      const auto expected = c.at("greedy_logprobs").get<std::vector<double>>();
      const auto gaps = c.at("greedy_gap").get<std::vector<double>>();
      Conversation request = loaded.conversation();
      std::vector<float> logits = loaded.feed(request, prompt, 512);
      double difference = 0;
      int64_t clear = 0, equal = 0;
      for (size_t i = 0; i < greedy.size(); ++i) {
        difference += std::abs(log_probabilities(logits)[greedy[i]] - expected[i]);
        if (gaps[i] >= 0.1) {
          ++clear;
          equal += argmax(logits) == greedy[i];
        }
        logits = loaded.feed(request, std::span(&greedy[i], 1), 1, true);
      }
      EXPECT_LE(difference / static_cast<double>(greedy.size()), 0.05) << prompt.size();
      EXPECT_GE(equal, 0.97 * static_cast<double>(clear)) << prompt.size();
    }
  }
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(KvCache, PagesThatNobodyWroteAreNotResident) {
  LoadedModel loaded(open_checkpoint(kHy3), {}, 64);
  ASSERT_TRUE(loaded.ok());
  const int64_t before = resident_bytes(), pages = 65536;
  ASSERT_GT(pages * loaded.model().page_bytes(), int64_t{1} << 31);
  ASSERT_TRUE(loaded.model().allocate_pages(pages, loaded.stream()).ok());
  Conversation request = loaded.conversation(5000);
  EXPECT_FALSE(loaded.feed(request, random_ids(20, 512), 20).empty());
  EXPECT_LT(resident_bytes() - before, int64_t{64} << 20);
}

TEST(Load, NamesTheTensorItsShapeAndTheShapeNeeded) {
  const std::string gate = "model.layers.1.mlp.experts.3.gate_proj.weight";
  AlteredCheckpoint checkpoint(kHy3);
  checkpoint.replace(gate, checkpoint.make(DType::bf16, {64, 256}));
  expect_load_fails(checkpoint, {}, Code::invalid_argument,
                    {gate.c_str(), "bf16[64, 256]", "moe_intermediate = 128", "hidden = 256"});
  checkpoint.remove(gate);
  checkpoint.replace(gate, checkpoint.make(DType::i32, {128, 256}));
  expect_load_fails(checkpoint, {}, Code::unsupported, {gate.c_str(), "i32", "q4_1"});

  AlteredCheckpoint norm(kHy3);
  norm.replace("model.layers.0.self_attn.q_norm.weight", norm.make(DType::f32, {64}));
  expect_load_fails(norm, {}, Code::invalid_argument, {"q_norm.weight", "f32[64]", "head_dim = 128"});
}

TEST(Load, RefusesMissingTensors) {
  for (const char* name :
       {"model.norm.weight", "lm_head.weight", "model.layers.2.mlp.expert_bias",
        "model.layers.1.mlp.shared_mlp.up_proj.weight", "model.layers.2.self_attn.v_proj.weight"}) {
    AlteredCheckpoint checkpoint(kHy3);
    checkpoint.remove(name);
    expect_load_fails(checkpoint, {}, Code::not_found, {name});
  }
}

TEST(Load, RefusesTensorsThatNothingUses) {
  AlteredCheckpoint biased(kQwen);
  for (const char* name : {"model.layers.2.self_attn.q_proj.bias", "model.layers.3.self_attn.q_proj.bias"})
    biased.replace(name, biased.make(DType::bf16, {512}));
  expect_load_fails(biased, {}, Code::unsupported,
                    {"no place for tensor 'model.layers.2.self_attn.q_proj.bias'", "2 such tensors"});

  AlteredCheckpoint plain(kHy3);
  plain.change_config().qk_norm = false;
  const std::string norms = std::to_string(2 * plain.config().layers) + " such tensors";
  expect_load_fails(plain, {}, Code::unsupported,
                    {"'model.layers.0.self_attn.k_norm.weight'", norms.c_str()});

  AlteredCheckpoint head(kQwen);  // tied: a second copy of the embedding
  head.replace("lm_head.weight", head.make(DType::bf16, {head.config().vocab, head.config().hidden}));
  EXPECT_TRUE(model::Model::load(head, {}).ok());
}

TEST(Load, RefusesOptionsOutOfRange) {
  const auto checkpoint = open_checkpoint(kHy3);
  expect_load_fails(*checkpoint, {.page_tokens = 24}, Code::invalid_argument,
                    {"page_tokens is 24", "power of two"});
  expect_load_fails(*checkpoint, {.page_tokens = 512}, Code::invalid_argument, {"page_tokens is 512"});
  expect_load_fails(*checkpoint, {.max_tokens = 0}, Code::invalid_argument, {"max_tokens is 0"});
  expect_load_fails(*checkpoint, {.max_model_len = 4097}, Code::invalid_argument,
                    {"max_model_len is 4097", "4096"});
  expect_load_fails(*checkpoint, {.kv_dtype = DType::q8_0}, Code::invalid_argument, {"kv_dtype is q8_0"});
  expect_load_fails(*checkpoint, {.router_mode = "fast"}, Code::invalid_argument, {"router_mode is 'fast'"});
}

TEST(Forward, RefusesWhatDoesNotFit) {
  LoadedModel loaded(open_checkpoint(kHy3), {.max_tokens = 8, .max_requests = 2}, 64);
  ASSERT_TRUE(loaded.ok());
  const auto ids = random_ids(9, 512);
  const auto refused = [&](const model::ForwardInput& input, const char* text) {
    const Status status = loaded.model().forward(input, Tensor(), loaded.stream());
    EXPECT_EQ(status.code(), Code::invalid_argument) << status.message();
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  };
  Conversation request = loaded.conversation();
  StepBuilder too_long = loaded.step().add(request, ids, Rows::none);
  refused(too_long.input(), "tokens is 9, needs 0 to 8");

  request = loaded.conversation();
  StepBuilder fits = loaded.step().add(request, std::span(ids).first(4), Rows::none);
  model::ForwardInput input = fits.input();
  input.decode_requests = 1;
  refused(input, "decode request");
  input = fits.input();
  input.slots = input.slots.first(3);
  refused(input, "slots has 3 entries, needs 4");
  input = fits.input();
  const std::vector<int64_t> row = {4};
  input.logit_rows = row;
  refused(input, "logit row is 4");

  const std::vector<int32_t> bad_ids = {1, 512};
  request = loaded.conversation();
  StepBuilder outside = loaded.step().add(request, bad_ids, Rows::none);
  refused(outside.input(), "512");
  std::vector<int64_t> bad_slots = {0, 1, 2, int64_t{1} << 40};
  input = fits.input();
  input.slots = bad_slots;
  refused(input, "slots");
}

TEST(Forward, AnEmptyStepIsAResult) {
  LoadedModel loaded(open_checkpoint(kHy3), {}, 64);
  ASSERT_TRUE(loaded.ok());
  EXPECT_TRUE(loaded.step().run(loaded.stream()).empty());
}

TEST(Explain, ListsTheCallsOfAStep) {
  LoadedModel loaded(open_checkpoint(kHy3), {}, 64);
  ASSERT_TRUE(loaded.ok());
  std::map<int64_t, std::map<std::string, int>> calls;
  for (const model::OpUse& use : loaded.model().explain(model::Phase::decode, 3, loaded.stream())) {
    EXPECT_FALSE(use.choice.row.empty()) << use.op;
    EXPECT_EQ(use.phase, model::Phase::decode);
    EXPECT_EQ(use.batch, 3);
    ++calls[use.layer][use.op];
  }
  using Counts = std::map<std::string, int>;
  EXPECT_EQ(calls[-1], (Counts{{"embedding", 1}, {"decode_schedule", 1}, {"rms_norm", 1}, {"linear", 1}}));
  EXPECT_EQ(calls[0], (Counts{{"rms_norm", 2},
                              {"linear", 4},
                              {"attention_prologue", 1},
                              {"attention_decode", 1},
                              {"silu_mul", 1}}));
  EXPECT_EQ(calls[2], (Counts{{"rms_norm", 2},
                              {"linear", 2},
                              {"attention_prologue", 1},
                              {"attention_decode", 1},
                              {"choose_experts", 1},  // by the two behind it
                              {"router_gemm", 1},
                              {"route_top_k", 1},
                              {"fused_moe", 1}}));
}

TEST(Explain, ListsTheCallsOfAPromptChunk) {
  LoadedModel loaded(open_checkpoint(kHy3), {}, 64);
  ASSERT_TRUE(loaded.ok());
  std::map<int64_t, std::map<std::string, int>> calls;
  for (const model::OpUse& use : loaded.model().explain(model::Phase::prefill, 40, loaded.stream())) {
    EXPECT_FALSE(use.choice.row.empty()) << use.op;
    EXPECT_EQ(use.phase, model::Phase::prefill);
    EXPECT_EQ(use.batch, 40);
    ++calls[use.layer][use.op];
  }
  using Counts = std::map<std::string, int>;
  EXPECT_EQ(calls[-1], (Counts{{"embedding", 1}, {"rms_norm", 1}, {"linear", 1}}));
  EXPECT_EQ(calls[0], (Counts{{"rms_norm", 2},
                              {"linear", 4},
                              {"attention_prologue", 1},
                              {"attention_prefill", 1},
                              {"silu_mul", 1}}));
}

}  // namespace
}  // namespace vivace::testing
