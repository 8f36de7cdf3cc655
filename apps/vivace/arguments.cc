#include "apps/vivace/arguments.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>

#include "apps/vivace/output.h"
#include "apps/vivace/schedule_map.h"
#include "apps/vivace/value.h"
#include "src/bench/http_target.h"
#include "src/bench/ops/run.h"
#include "src/bench/ops/suite.h"
#include "src/bench/workload.h"
#include "src/core/error.h"
#include "src/cpu/machine.h"
#include "src/engine/check_options.h"
#include "src/model/synthetic.h"
#include "vivace/dispatch.h"

namespace vivace::cli {

namespace {

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

/// Reports a value that does not fit as "--flag is 'x', needs ...".
[[noreturn]] void refuse(const std::string& flag, const Status& status) {
  throw CLI::ValidationError(flag + " " + status.message(), CLI::ExitCodes::ValidationError);
}

/// An option whose text goes through `parse` (a function from text to Result) to `use`.
template <class Parse, class Use>
CLI::Option* add(CLI::App& app, const std::string& flag, const std::string& type, const std::string& help,
                 Parse parse, Use use) {
  return app
      .add_option_function<std::string>(
          flag,
          [flag, parse, use](const std::string& text) {
            auto value = parse(text);
            if (!value.ok()) refuse(flag, value.status());
            use(std::move(value).value());
          },
          help)
      ->type_name(type);
}

/// An option that may be given several times; its texts go to `texts`. They are parsed when all are there: an error
/// thrown before gets the flag in front twice.
CLI::Option* repeated(CLI::App& app, const std::string& flag, const std::string& type,
                      const std::string& help, std::vector<std::string>& texts) {
  return app.add_option(flag, help)
      ->type_name(type)
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->each([&texts](const std::string& text) { texts.push_back(text); });
}

/// The help shows the range where there is an end to it.
CLI::Option* integer(CLI::App& app, const std::string& flag, int64_t low, int64_t high,
                     const std::string& help, std::function<void(int64_t)> use) {
  const std::string type = high == kAny ? "N" : fmt::format("{}..{}", low, high);
  return add(
      app, flag, type, help, [=](const std::string& text) { return parse_integer(text, low, high); }, use);
}

/// A path, or another text that says nothing when it is empty.
CLI::Option* filled(CLI::App& app, const std::string& flag, const std::string& type, const std::string& help,
                    std::string& target) {
  return add(
      app, flag, type, help,
      [type](const std::string& text) -> Result<std::string> {
        if (!text.empty()) return text;
        return invalid_argument("is '', needs {} {}", type.front() == 'A' ? "an" : "a", type);
      },
      [&target](std::string text) { target = std::move(text); });
}

CLI::Option* number(CLI::App& app, const std::string& flag, double low, double high, bool above_low,
                    const std::string& help, std::function<void(double)> use) {
  const std::string type = high < kMostFp32 ? fmt::format("{}..{}", low, high) : "X";
  return add(
      app, flag, type, help,
      [=](const std::string& text) { return parse_number(text, low, high, above_low); }, use);
}

Result<std::string> parse_device(const std::string& text) {
  if (text == "cpu" || text == "cuda") return text;
  if (text.starts_with("cuda:") && parse_integer(text.substr(5), 0, 1023).ok()) return text;
  return invalid_argument("is '{}', needs cpu, cuda or cuda:N", text);
}

Result<std::string> parse_dtype(const std::string& text) {
  if (text == "auto" || text == "f32" || text == "bf16") return text;
  return invalid_argument("is '{}', needs auto, f32 or bf16", text);
}

/// A device computes in one type, so the option can only confirm it.
Status check_dtype(const std::string& dtype, const std::string& device) {
  const std::string_view own = device == "cpu" ? "f32" : "bf16";
  if (dtype == "auto" || dtype == own) return {};
  return unsupported(
      "is '{}', needs auto or {}: activations are f32 on the cpu and bf16 on a GPU, and --device is {}",
      dtype, own, device);
}

Result<DType> parse_kv_dtype(const std::string& text) {
  if (text == "f32") return DType::f32;
  if (text == "bf16") return DType::bf16;
  if (text == "auto") return DType::none;
  if (text == "fp8") return DType::fp8_e4m3;
  return invalid_argument("is '{}', needs auto, f32, bf16 or fp8", text);
}

Result<std::string> parse_router_mode(const std::string& text) {
  if (text == "exact" || text == "two_term") return text;
  return invalid_argument("is '{}', needs exact or two_term", text);
}

Result<int64_t> parse_page_tokens(const std::string& text) {
  const Result<int64_t> value = parse_integer(text, 1, 256);
  if (value.ok() && std::has_single_bit(static_cast<uint64_t>(*value))) return *value;
  return invalid_argument("is '{}', needs a power of two from 1 to 256", text);
}

/// More threads than cores only wait for each other; a few times as many can be wanted in a comparison.
Result<int64_t> parse_threads(const std::string& text) {
  constexpr int64_t kPerCore = 4;
  const int64_t cores = cpu::usable_cores();
  const Result<int64_t> value =
      parse_integer(text, 1, std::min<int64_t>(kPerCore * cores, engine::kMaxThreads));
  if (value.ok()) return *value;
  return invalid_argument("{} ({} for each of the {} core{} that this process may use)",
                          value.status().message(), kPerCore, cores, cores == 1 ? "" : "s");
}

/// A model in files, or random weights: a name that is no model's is a mistake here.
CLI::Option* add_model(CLI::App& app, std::string& model) {
  return app
      .add_option_function<std::string>(
          "--model",
          [&model](const std::string& text) {
            if (text.empty()) refuse("--model", invalid_argument("is '', needs a PATH"));
            if (model::is_synthetic(text)) {
              const Status status = model::open_synthetic(text).status();
              if (!status.ok()) refuse("--model", status);
            }
            model = text;
          },
          "A .gguf file, or a folder with config.json and safetensors;\nor "
          "synthetic:NAME[,layers=N][,dtype=TYPE]: "
          "random weights on a GPU, such as\nsynthetic:hy3@tp8 (another name lists those there are)")
      ->type_name("PATH");
}

/// Rows that run alone. The message of a value that does not fit has the flag.
CLI::Option* add_prefer(CLI::App& app, const std::string& help, std::string& prefer) {
  return app
      .add_option_function<std::string>(
          "--prefer",
          [&prefer](const std::string& text) {
            const Status status = Dispatch().prefer(text);
            if (!status.ok()) throw CLI::ValidationError(status.message(), CLI::ExitCodes::ValidationError);
            prefer = text;
          },
          help)
      ->type_name("OP=ROW");
}

/// The model, what it runs on and how.
void add_compute(CLI::App& app, EngineOptions& o) {
  const std::string group = "Model and engine";
  add_model(app, o.model)->required();
  const auto in_group = [&](CLI::Option* option) { return option->group(group); };
  app.get_option("--model")->group(group);
  in_group(add(app, "--device", "NAME", "Where it runs: cpu, cuda or cuda:N [cpu]", parse_device,
               [&](std::string text) { o.device = std::move(text); }));
  const auto dtype = std::make_shared<std::string>("auto");
  in_group(add(app, "--dtype", "TYPE",
               "Type of activations: auto, f32 or bf16 [auto: f32 on the cpu, bf16 on a GPU]", parse_dtype,
               [dtype](std::string text) { *dtype = std::move(text); }));
  app.parse_complete_callback([dtype, &o] {
    const bool cpu = o.device == "cpu";
    const Status status = check_dtype(*dtype, o.device);
    if (!status.ok()) refuse("--dtype", status);
    if (cpu && model::is_synthetic(o.model)) {
      refuse("--model",
             unsupported("is '{}', needs --device cuda: random weights are made on a GPU", o.model));
    }
    if (!cpu && o.kv_dtype == DType::f32) {
      refuse("--kv-dtype", unsupported("is 'f32', needs auto, bf16 or fp8: --device is {}", o.device));
    }
    const Status limits = engine::check_options(o);
    if (!limits.ok()) throw CLI::ValidationError(in_flags(limits.message()));
  });
  in_group(
      add(app, "--kv-dtype", "TYPE",
          "Type of stored keys and values: auto, f32, bf16 or fp8 [auto: f32 on the cpu, bf16 on a GPU]\n"
          "fp8 takes the checkpoint's scales, or 1",
          parse_kv_dtype, [&](DType dtype) { o.kv_dtype = dtype; }));
  in_group(add(app, "--threads", "N", "Threads, 1 to 4 per core [one per core this process may use]",
               parse_threads, [&](int64_t n) { o.threads = static_cast<int>(n); }));
  in_group(app.add_flag("--exact", o.exact,
                        "No quantisation of activations inside linear: slower, closer to fp32"));
  in_group(app.add_flag("--deterministic", o.deterministic,
                        "A request gives the same bits whatever runs beside it"));
  in_group(add(app, "--router-mode", "MODE", "Accuracy of expert scores: exact or two_term [exact]",
               parse_router_mode, [&](std::string text) { o.router_mode = std::move(text); }));
  in_group(add_prefer(app,
                      "Use these rows alone: OP=ROW[,OP=ROW], such as linear=reference\nA call that they do "
                      "not fit is an error with the reason",
                      o.prefer));
  in_group(add(app, "--page-tokens", "N",
               "Tokens per page of keys and values, a power of two from 1 to 256 [16]", parse_page_tokens,
               [&](int64_t n) { o.page_tokens = n; }));
}

/// The options that every command with an engine takes.
void add_engine(CLI::App& app, EngineOptions& o) {
  add_compute(app, o);
  const auto in_group = [&](CLI::Option* option) {
    return option->group(app.get_option("--model")->get_group());
  };
  in_group(integer(app, "--max-model-len", 0, kAny,
                   "Longest prompt plus output, in tokens; 0 takes the model's context [0]",
                   [&](int64_t n) { o.max_model_len = n; }));
  in_group(integer(app, "--max-batch", 1, 4096, "Requests that run at once [64]",
                   [&](int64_t n) { o.max_batch = n; }));
  in_group(integer(app, "--token-budget", 1, 1 << 20,
                   "Tokens per step, prompt chunks and decodes together; at least --max-batch [512]",
                   [&](int64_t n) { o.token_budget = n; }));
  in_group(add(
      app, "--kv-memory", "BYTES", "Memory for keys and values, such as 512M or 2G [fits the machine]",
      [](const std::string& text) { return parse_bytes(text); }, [&](int64_t n) { o.kv_memory_bytes = n; }));
}

CLI::App* add_command(CLI::App& app, const std::string& name, const std::string& text,
                      const std::string& footer) {
  CLI::App* command = app.add_subcommand(name, text);
  command->footer(footer);
  command->get_formatter()->column_width(30);
  return command;
}

void add_generate(CLI::App& app, GenerateArgs& a) {
  CLI::App& c = *add_command(
      app, "generate",
      "Generate text from one prompt and stream it to standard output.\n\n"
      "The prompt is raw text (--prompt; text that spells a control token becomes that token), token ids\n"
      "(--prompt-ids, for models without a tokenizer too), or one chat message (--chat; rendered with the\n"
      "model's chat template, and text that spells a control token stays text). Without a sampling option "
      "the\n"
      "most likely token is taken each time, so that a run repeats. With --json nothing is streamed: one\n"
      "document has the ids, the text, log-probabilities, counts and times.",
      "Examples:\n"
      "  vivace generate --model model.gguf --chat \"Explain a hash table in two sentences.\"\n"
      "  vivace generate --model model.gguf --prompt \"Once upon a time\" --temperature 0.8 --top-p 0.95 "
      "--seed 7\n"
      "  vivace generate --model tests/data/tiny-hy3 --prompt-ids 1,2,3 --max-tokens 8 --logprobs 3 --json");
  auto* prompt = c.add_option("--prompt", a.prompt, "Raw text")->type_name("TEXT");
  auto* ids = add(
      c, "--prompt-ids", "IDS", "Token ids joined by commas",
      [](const std::string& text) { return parse_ids(text); },
      [&](std::vector<int32_t> value) { a.prompt_ids = std::move(value); });
  auto* chat = c.add_option("--chat", a.chat, "A user's message")->type_name("TEXT");
  prompt->excludes(ids)->excludes(chat);
  ids->excludes(chat);
  c.add_option("--system", a.system, "A system message before --chat")->type_name("TEXT")->needs(chat);
  integer(c, "--max-tokens", 1, kAny, "Tokens to generate at most [128]",
          [&](int64_t n) { a.max_tokens = n; });
  repeated(c, "--stop", "TEXT", "End before this text; may be given several times", a.stop);
  c.add_flag("--ignore-eos", a.ignore_eos, "Do not end at the model's end token");
  integer(c, "--logprobs", 0, 20, "Log-probabilities of the chosen token and of the N best",
          [&](int64_t n) { a.sampling.logprobs = static_cast<int>(n); });
  c.add_flag("--json", a.json, "One JSON document instead of text");

  const std::string group = "Sampling";
  SamplingParams& s = a.sampling;
  s.temperature = 0;
  auto* temperature =
      number(c, "--temperature", 0, kMostFp32, false,
             "0 takes the most likely token [0; 1 when --top-k, --top-p, --min-p or\n--seed is given]",
             [&](double x) { s.temperature = x; });
  auto* top_k = integer(c, "--top-k", 0, kAny, "Draw from the N most likely; 0: all [0]",
                        [&](int64_t n) { s.top_k = n; });
  auto* top_p = number(c, "--top-p", 0, 1, true, "Draw from the smallest set with this probability [1]",
                       [&](double x) { s.top_p = x; });
  auto* min_p = number(c, "--min-p", 0, 1, false, "Drop tokens below this share of the most likely one [0]",
                       [&](double x) { s.min_p = x; });
  auto* seed = add(
      c, "--seed", "N", "Makes a draw repeatable",
      [](const std::string& text) { return parse_integer(text, 0, kAny); },
      [&](int64_t n) { s.seed = static_cast<uint64_t>(n); });
  auto* repetition =
      number(c, "--repetition-penalty", 0, kMostFp32, true, "Above 1: tokens seen before are less likely [1]",
             [&](double x) { s.repetition_penalty = x; });
  auto* presence = number(c, "--presence-penalty", -2, 2, false, "Subtracted once for a generated token [0]",
                          [&](double x) { s.presence_penalty = x; });
  auto* frequency =
      number(c, "--frequency-penalty", -2, 2, false, "Subtracted for each time it was generated [0]",
             [&](double x) { s.frequency_penalty = x; });
  const auto biases = std::make_shared<std::vector<std::string>>();
  auto* bias =
      repeated(c, "--logit-bias", "ID=BIAS", "Added to a token's logit; may be given several times", *biases);
  for (CLI::Option* option :
       {temperature, top_k, top_p, min_p, seed, repetition, presence, frequency, bias}) {
    option->group(group);
  }
  add_engine(c, a.engine);
  c.callback([&, prompt, ids, chat, temperature, top_k, top_p, min_p, seed, biases] {
    for (const std::string& text : a.stop) {
      if (text.empty()) refuse("--stop", invalid_argument("is '', needs at least one character"));
    }
    for (const std::string& text : *biases) {
      const auto value = parse_bias(text);
      if (!value.ok()) refuse("--logit-bias", value.status());
      s.logit_bias.push_back(*value);
    }
    if (prompt->count() + ids->count() + chat->count() == 0) {
      throw CLI::ValidationError("one of --prompt, --prompt-ids and --chat is needed");
    }
    const bool draws = top_k->count() + top_p->count() + min_p->count() + seed->count() > 0;
    if (temperature->count() == 0 && draws) s.temperature = 1;
  });
}

void add_score(CLI::App& app, ScoreArgs& a) {
  CLI::App& c = *add_command(
      app, "score",
      "Measure how well a model predicts a text: its perplexity.\n\n"
      "Documents in the file are separated by NUL bytes; each is tokenised by itself and followed by the "
      "separator\n"
      "id. The ids are joined and cut into windows that do not overlap; the first token of a window is not\n"
      "predicted. Lower is better; the same text, window and separator are needed for two results to be "
      "comparable.",
      "Example:\n"
      "  vivace score --model tests/data/tiny-qwen3-moe --text-file tests/data/tiny-qwen3-moe/sample.txt \\\n"
      "    --window 1024 --max-windows 4 --separator-id 0");
  filled(c, "--text-file", "FILE", "The text", a.text_file)->required();
  integer(c, "--window", 2, kAny, "Tokens per window, 2 to the model's context", [&](int64_t n) {
    a.window = n;
  })->required();
  integer(c, "--max-windows", 1, kAny, "Stop after this many windows [all]",
          [&](int64_t n) { a.max_windows = n; });
  integer(c, "--separator-id", 0, std::numeric_limits<int32_t>::max(),
          "Token that ends a document [the model's end token]",
          [&](int64_t n) { a.separator_id = static_cast<int32_t>(n); });
  filled(c, "--router-inputs", "FILE",
         "Write what the routers of a mixture of experts are given: safetensors, a tensor\n"
         "model.layers.N.router_input [tokens, hidden] each. The file must not exist;\n"
         "a model without routers is refused",
         a.router_inputs);
  c.add_flag("--json", a.json, "One JSON document instead of text");
  add_engine(c, a.engine);
}

void add_tokenize(CLI::App& app, TokenizeArgs& a) {
  CLI::App& c =
      *add_command(app, "tokenize",
                   "Show the token ids of a text, and the text that the ids give back.\n\n"
                   "Text that spells a control token, such as <|im_start|>, is ordinary text unless "
                   "--parse-special is given.",
                   "Examples:\n"
                   "  vivace tokenize --model tests/data/tiny-qwen3-moe --text \"Hello, world!\"\n"
                   "  vivace tokenize --model model.gguf --text \"<|im_start|>user\" --parse-special --json");
  filled(c, "--model", "PATH", "A .gguf file, or a folder with config.json and tokenizer.json", a.model)
      ->required();
  c.add_option("--text", a.text, "The text")->required()->type_name("TEXT");
  c.add_flag("--parse-special", a.parse_special, "Text that spells a control token becomes that token");
  c.add_flag("--json", a.json, "One JSON document instead of a table");
}

void add_quantize(CLI::App& app, QuantizeArgs& a) {
  CLI::App& c = *add_command(
      app, "quantize",
      "Write an FP8 copy of a model: e4m3 weights of attention, MLPs and experts with their scales, the rest "
      "as it is.\n\n"
      "The model is a folder with f32, f16 or bf16 safetensors; the result has the tensor names of Hugging "
      "Face's FP8\n"
      "checkpoints. Schemes:\n"
      "  per-tensor  a scale per matrix; static scales of activations, keys and values, measured on "
      "--calibration\n"
      "  block128    a scale per 128 x 128 weights; activations get theirs at run time. With --calibration "
      "the keys\n"
      "              and values have scales too\n"
      "Calibration runs the unquantised model over the text on the CPU. Ranges that it does not see are "
      "clipped later,\n"
      "so the text should be like what the model will read; --margin leaves room above.",
      "Examples:\n"
      "  vivace quantize --model tests/data/tiny-qwen3-moe --out /tmp/tiny-fp8 --scheme per-tensor \\\n"
      "    --calibration tests/data/tiny-qwen3-moe/sample.txt --max-windows 8\n"
      "  vivace quantize --model tests/data/tiny-hy3 --out /tmp/tiny-hy3-fp8 --scheme block128");
  filled(c, "--model", "PATH", "A folder with config.json and safetensors", a.model)->required();
  filled(c, "--out", "DIR", "The folder to write; new, or empty", a.out)->required();
  add(
      c, "--scheme", "NAME", "per-tensor or block128",
      [](const std::string& text) -> Result<std::string> {
        if (text == "per-tensor" || text == "block128") return text;
        return invalid_argument("is '{}', needs per-tensor or block128", text);
      },
      [&](std::string text) { a.scheme = std::move(text); })
      ->required();
  auto* text =
      filled(c, "--calibration", "FILE",
             "Plain text of at least 32 tokens; documents are separated by NUL bytes", a.calibration_file);
  auto* ids =
      filled(c, "--calibration-ids", "FILE",
             "Token ids instead of a text, for models without a tokenizer: numbers\nbetween white space, "
             "commas or brackets",
             a.calibration_ids);
  text->excludes(ids);
  auto* windows = integer(c, "--max-windows", 1, kAny, "Calibrate on this many windows of 1024 tokens [all]",
                          [&](int64_t n) { a.max_windows = n; });
  auto* margin =
      number(c, "--margin", 1, 1000, false, "Activations may get this many times larger than in the text [1]",
             [&](double x) { a.margin = x; });
  add(
      c, "--scale-dtype", "TYPE", "Type of the weights' scales: f32 or bf16 [f32]",
      [](const std::string& text) -> Result<DType> {
        if (text == "f32") return DType::f32;
        if (text == "bf16") return DType::bf16;
        return invalid_argument("is '{}', needs f32 or bf16", text);
      },
      [&](DType type) { a.scale_type = type; });
  add(c, "--threads", "N", "Threads, 1 to 4 per core [one per core this process may use]", parse_threads,
      [&](int64_t n) { a.threads = static_cast<int>(n); });
  c.add_flag("--json", a.json, "One JSON document instead of a table");
  c.callback([&, text, ids, windows, margin] {
    if (text->count() + ids->count() > 0) return;
    if (a.scheme == "per-tensor") {
      throw CLI::ValidationError(
          "--calibration or --calibration-ids is needed with --scheme per-tensor: static scales of "
          "activations "
          "come from a text that is like what the model will read");
    }
    for (const CLI::Option* option : {windows, margin}) {
      if (option->count() == 0) continue;
      throw CLI::ValidationError(option->get_name() + " needs --calibration or --calibration-ids");
    }
  });
}

/// A line per suite: its name and what it times.
std::string suite_lines() {
  std::string text;
  for (const bench::OpSuite& suite : bench::op_suites()) {
    text += fmt::format("\n  {:<18} {}", suite.name, suite.summary);
  }
  return text;
}

void add_bench_ops(CLI::App& bench, BenchOpsArgs& a) {
  CLI::App& c = *add_command(
      bench, "ops",
      "Time single operators on a GPU beside the least time that their bytes and operations allow.\n\n"
      "Each case is checked once against float64 on the same inputs, then timed: distinct inputs in turn, so "
      "that caches\n"
      "are cold as in serving, one graph with a call per input, the median of its replays. The floor is "
      "bytes over 4.5 TB/s\n"
      "or operations over 890 (bf16) and 1,700 (fp8) TFLOP/s: rates that an H200 reaches in microbenchmarks "
      "of one thing.\n"
      "--suite roof times a read, a copy and cuBLASLt's largest products beside them on this machine; "
      "products "
      "stay below.\n\n"
      "Where cuBLASLt can do a case it is timed too, in the same way and on the same inputs, on lines of its "
      "own: in\n"
      "router_gemm as cublas_fp32_with_cast (x widened first, as callers must), cublas_fp32, cublas_tf32 "
      "and\n"
      "cublas_bf16, in grouped_gemm as cublaslt_loop (a call per group). choose_experts has its two_calls "
      "beside it.\n"
      "Targets are for our rows alone.\n\n"
      "--case with fields that no listed case has together makes a case of its own: what it does not name "
      "comes from the\n"
      "listed case nearest to it. In fused_moe another tp changes intermediate and another ep experts, "
      "unless "
      "they are\n"
      "named too. The name of a case stands for shapes; with others it is \"own\". An attention case is "
      "named "
      "by the lengths\n"
      "of its requests, or by a seed that draws 1 to 256 of 1 to 200K tokens: random:7.\n\n"
      "routing in fused_moe says which experts the tokens have: uniform; zipf, the r-th most popular with a "
      "weight of 1/r;\n"
      "half, the other half has no row; one, every choice of every token is the same expert; one_local, only "
      "the first is,\n"
      "the others are of other ranks. The floor is that of the experts and rows of the case. Where --targets "
      "has no time for\n"
      "a case of fused_moe, the table has that of the formula behind the targets in its place, with a ~.\n\n"
      "Suites:" +
          suite_lines(),
      "Examples:\n"
      "  vivace bench ops --suite roof\n"
      "  vivace bench ops --suite fused_moe --case hy3,tokens=64,tp=8\n"
      "  vivace bench ops --suite fused_moe --case routing=zipf --case hy3,tokens=64,tp=8,routing=one\n"
      "  vivace bench ops --suite layer --case op=linear --case op=rms_norm,tokens=128,y=bf16\n"
      "  vivace bench ops --suite attention_decode --case 5x3000,heads_q=40,heads_kv=8,kv=bf16\n"
      "  vivace bench ops --suite router_gemm --prefer router_gemm=cuda --targets targets.json --json "
      "result.json");
  const auto suites = std::make_shared<std::vector<std::string>>();
  const auto cases = std::make_shared<std::vector<std::string>>();
  repeated(c, "--suite", "NAME", "Suite to run; may be given several times [all]", *suites);
  repeated(c, "--case", "NAME,FIELD=VALUE,...",
           "A case by name and fields, listed or of your own; may be given several times [all]", *cases);
  add(
      c, "--device", "NAME", "cuda or cuda:N [cuda]",
      [](const std::string& text) -> Result<std::string> {
        if (text != "cpu" && parse_device(text).ok()) return text;
        return invalid_argument(
            "is '{}', needs cuda or cuda:N{}", text,
            text == "cpu" ? ": these suites time a GPU (vivace-op-bench times CPU rows)" : "");
      },
      [&](std::string text) { a.device = std::move(text); });
  add_prefer(c, "Rows to run instead of the first that fits: OP=ROW[,OP=ROW]", a.prefer);
  integer(c, "--replays", 20, 100000, "Replays that a median is taken of [20]",
          [&](int64_t n) { a.replays = n; });
  auto* targets =
      filled(c, "--targets", "FILE", "JSON with target times; adds target and ratio columns", a.targets_file);
  auto* json =
      filled(c, "--json", "FILE", "Write all results to this file; - is standard output", a.json_file);
  c.add_flag(
      "--no-baselines", [&](int64_t) { a.baselines = false; }, "Time no libraries beside our rows");
  c.add_flag("--list", a.list, "List the cases and stop")->excludes(targets)->excludes(json);
  c.callback([&a, suites, cases] {
    std::vector<bench::OpFilter> filters;
    for (const std::string& text : *cases) {
      Result<bench::OpFilter> filter = bench::OpFilter::parse(text);
      if (!filter.ok())
        throw CLI::ValidationError(fmt::format("--case '{}': {}", text, filter.status().message()));
      filters.push_back(std::move(*filter));
    }
    Result<std::vector<bench::OpWorkload>> workloads = bench::select_workloads(*suites, filters);
    if (!workloads.ok())
      throw CLI::ValidationError("--" + workloads.status().message());  // "suite is", "case 'x':"
    a.workloads = std::move(*workloads);
  });
}

Result<std::vector<int64_t>> parse_batches(const std::string& text) {
  constexpr int64_t kMost = 4096;
  std::vector<int64_t> batches;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const Result<int64_t> batch = parse_integer(text.substr(begin, end - begin), 1, kMost);
    if (!batch.ok()) return batch.status();
    batches.push_back(*batch);
    begin = end + 1;
  }
  return batches;
}

void add_bench_step(CLI::App& bench, BenchStepArgs& a) {
  CLI::App& c =
      *add_command(bench, "step",
                   "Time decode steps of a whole model beside the least time that their bytes allow.\n\n"
                   "Random keys and values fill the pages of --batch requests with --context tokens each; "
                   "then the model decodes one "
                   "token\n"
                   "of each, step after step, as the engine would: sampling included, on a GPU by graph "
                   "replay and with the next step\n"
                   "enqueued while one runs. The floor of a step is the bytes of its dense weights, of the "
                   "experts that its tokens "
                   "touch and\n"
                   "of the keys and values that it reads, over the rate at which this device was just "
                   "measured to read memory.",
                   "Examples:\n"
                   "  vivace bench step --model synthetic:hy3@tp8 --device cuda --batch 1,4,8,16,32,64 "
                   "--context 8192 --json step.json\n"
                   "  vivace bench step --model synthetic:qwen3-30b-a3b,layers=4 --device cuda --batch 16 "
                   "--prefer fused_moe=cuda\n"
                   "  vivace bench step --model synthetic:hy3@tp8 --device cuda --batch 1,16 --context 8192 "
                   "--operators\n"
                   "  vivace bench step --model tests/data/tiny-hy3 --batch 1,4 --context 256 --steps 16");
  add(c, "--batch", "N[,N...]", "Requests per step, 1 to 4096; each number is measured by itself [1]",
      parse_batches, [&](std::vector<int64_t> value) { a.batches = std::move(value); });
  integer(
      c, "--context", 1, kAny,
      "Tokens that each request has, the one that is computed included; at most the model's context [1024]",
      [&](int64_t n) { a.context = n; });
  // Fewer have no tenth and no ninetieth percentile beside the median.
  integer(c, "--steps", 5, 1000000, "Steps that are timed, after a few that are not [64]",
          [&](int64_t n) { a.steps = n; });
  c.add_flag(
      "--operators", a.operators,
      "Show where the time of a step goes: in more steps every operator call is timed by itself, beside\n"
      "the least time that its bytes allow");
  integer(c, "--seed", 0, kAny, "Of keys, values and draws [0]",
          [&](int64_t n) { a.seed = static_cast<uint64_t>(n); });
  filled(c, "--json", "FILE", "Write all results to this file; - is standard output", a.json_file);
  add_compute(c, a.engine);
}

bool same_path(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code failure;  // what cannot be resolved is compared as it is spelled
  return fs::weakly_canonical(a, failure) == fs::weakly_canonical(b, failure);
}

/// Seconds, on the command line with a fraction if need be.
CLI::Option* seconds(CLI::App& app, const std::string& flag, double low, double high, const std::string& help,
                     std::chrono::milliseconds& target) {
  return number(app, flag, low, high, false, help,
                [&target](double x) { target = std::chrono::milliseconds(std::llround(x * 1000)); });
}

Result<server::LogLevel> parse_log_level(const std::string& text) {
  if (text == "all") return server::LogLevel::all;
  if (text == "errors") return server::LogLevel::errors;
  if (text == "off") return server::LogLevel::off;
  return invalid_argument("is '{}', needs all, errors or off", text);
}

Result<int64_t> parse_size(const std::string& text, int64_t low, int64_t high) {
  Result<int64_t> bytes = parse_bytes(text);
  if (!bytes.ok() || (*bytes >= low && *bytes <= high)) return bytes;
  return invalid_argument("is '{}', needs {}..{} bytes", text, low, high);
}

void add_serve(CLI::App& app, ServeArgs& a) {
  CLI::App& c = *add_command(
      app, "serve",
      "Serve a model over HTTP as OpenAI's API does: /v1/completions and /v1/chat/completions, streamed or "
      "not,\n"
      "/v1/models, /health, /metrics (Prometheus), and what benchmark clients of other servers ask for "
      "(/generate,\n"
      "/get_server_info, /flush_cache). SIGTERM, SIGINT and SIGHUP end it: running requests have "
      "--shutdown-timeout "
      "to "
      "finish,\n"
      "a second signal ends them at once; either way their clients are told. The log is one JSON object a "
      "line\n"
      "on standard error, between lines of plain text that say where it listens and how it ends.",
      "Examples:\n"
      "  vivace serve --model model.gguf\n"
      "  vivace serve --model model.gguf --host 0.0.0.0 --port 8080 --api-key-file keys.txt --max-queue 256\n"
      "  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\\n"
      "       -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 32, \"stream\": true}'");
  server::HttpOptions& http = a.server.http;
  filled(c, "--host", "ADDRESS", "IP address to listen on; 0.0.0.0 or :: is every one [127.0.0.1]",
         http.host);
  integer(c, "--port", 0, 65535, "Port to listen on; 0: any that is free, the log says which [8000]",
          [&](int64_t n) { http.port = static_cast<int>(n); });
  filled(c, "--served-model-name", "NAME", "The model's name in requests and answers [--model]",
         a.served_model_name);
  filled(c, "--api-key-file", "FILE",
         "Keys, one a line: requests need 'Authorization: Bearer KEY' with one of them\n[everybody may ask]",
         a.api_key_file);
  filled(c, "--chat-template", "FILE", "A Jinja template instead of the model's own", a.chat_template_file);
  add(c, "--log", "LEVEL", "Requests in the log: all, errors or off [all]", parse_log_level,
      [&](server::LogLevel level) { a.server.log = level; });
  const std::string group = "Limits";
  const auto limit = [&](CLI::Option* option) { option->group(group); };
  limit(integer(c, "--max-queue", 1, 1000000, "Requests beyond --max-batch; more are 429 [4096]",
                [&](int64_t n) { a.engine.max_waiting = n; }));
  limit(integer(c, "--max-connections", 1, 1000000,
                "Open connections; more are 503 [4096, or what the limit of open files allows]",
                [&](int64_t n) { http.max_connections = n; }));
  limit(add(
      c, "--max-body", "BYTES", "Longest body of a request, 1K to 64M; a longer one is 413 [8M]",
      [](const std::string& text) { return parse_size(text, 1 << 10, 64 << 20); },
      [&](int64_t n) { http.max_body = n; }));
  limit(add(
      c, "--max-header", "BYTES", "Longest request line and headers, 1K to 256K; longer ones are 431 [16K]",
      [](const std::string& text) { return parse_size(text, 1 << 10, 256 << 10); },
      [&](int64_t n) { http.max_header = n; }));
  limit(seconds(c, "--header-timeout", 0.1, 3600, "Seconds that headers may take; then 408 [10]",
                http.header_timeout));
  limit(seconds(c, "--body-timeout", 0.1, 3600, "Seconds that a body may take; then 408 [60]",
                http.body_timeout));
  limit(seconds(c, "--idle-timeout", 0.1, 3600, "Seconds that a connection may wait between requests [75]",
                http.idle_timeout));
  limit(seconds(c, "--write-timeout", 0.1, 3600,
                "Seconds that a token may wait for its reader; then the connection is cut [30]",
                http.write_timeout));
  limit(seconds(c, "--shutdown-timeout", 0, 3600, "Seconds that running requests have after SIGTERM [30]",
                a.shutdown_timeout));
  limit(integer(c, "--io-threads", 1, 16, "Threads for connections [2]",
                [&](int64_t n) { http.io_threads = static_cast<int>(n); }));
  limit(integer(c, "--workers", 1, 64, "Threads for JSON, templates and tokenising [2]",
                [&](int64_t n) { a.server.workers = static_cast<int>(n); }));
  add_engine(c, a.engine);
  c.add_flag_callback(
       "--no-prefix-cache", [&] { a.engine.prefix_cache = false; }, "Compute every prompt anew")
      ->group(c.get_option("--model")->get_group());
}

/// An option for the address of a server.
CLI::Option* add_url(CLI::App& app, const std::string& help, std::vector<std::string>& urls) {
  return app
      .add_option_function<std::vector<std::string>>(
          "--url",
          [&urls](const std::vector<std::string>& given) {
            for (const std::string& url : given) {
              const Status status = bench::HttpUrl::parse(url).status();
              if (!status.ok()) refuse("--url", status);
            }
            urls = given;
          },
          help)
      ->type_name("URL")
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

/// The other side of a comparison: this side's options, changed by the flags in `text`.
BenchServeArgs::Other parse_against(const BenchServeArgs& a, const std::string& text) {
  BenchServeArgs::Other other{a.engine, "", text};
  std::vector<std::string> urls;
  CLI::App app;
  app.set_help_flag();
  add_engine(app, other.engine);
  app.get_option("--model")->required(false);
  add_url(app, "", urls);
  try {
    app.parse(text);
  } catch (const CLI::ParseError& error) {
    const std::vector<std::string> unknown = app.remaining();
    throw CLI::ValidationError(fmt::format(
        "--against '{}': {}", text,
        unknown.empty() ? error.what() : fmt::format("a side has no '{}' of its own", unknown.front())));
  }
  if (urls.size() > 1) throw CLI::ValidationError("--against: --url is given twice, needs one");
  if (!urls.empty()) other.url = urls.front();
  if (urls.empty() && other.engine.model.empty())
    throw CLI::ValidationError(fmt::format("--against is '{}', needs --url or --model in it", text));
  return other;
}

/// What belongs to an engine of this process has no effect on servers.
void refuse_engine_options(const CLI::App& app) {
  const std::string group = app.get_option("--model")->get_group();
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name();
    if (option->get_group() != group || option->count() == 0) continue;
    if (name == "--model" || name == "--max-model-len") continue;
    throw CLI::ValidationError(name + " is for an engine of this process; with --url the server has its own");
  }
}

void check_bench_serve(const CLI::App& c, BenchServeArgs& a, const std::string& against) {
  if (a.report_file == "-") throw CLI::ValidationError("--report is '-', needs the path of an HTML file");
  if (!a.report_file.empty() && same_path(a.report_file, a.json_file)) {
    throw CLI::ValidationError(
        fmt::format("--report is '{}', needs another file than --json", a.report_file));
  }
  const auto given = [&](const char* flag) { return c.get_option(flag)->count() > 0; };
  if (!a.compare_files.empty()) {
    for (const char* flag : {"--model", "--url", "--against"}) {
      if (given(flag)) throw CLI::ValidationError(fmt::format("--compare excludes {}", flag));
    }
    return;
  }
  if (a.urls.size() > 2)
    throw CLI::ValidationError(fmt::format("--url is given {} times, needs at most two", a.urls.size()));
  if (!against.empty()) {
    if (a.urls.size() > 1) throw CLI::ValidationError("--against excludes a second --url");
    a.other = parse_against(a, against);
  } else if (a.urls.size() == 2) {
    a.other = BenchServeArgs::Other{a.engine, a.urls.back(), ""};
  }
  const bool engine = a.urls.empty() || (a.other && a.other->url.empty());
  if (a.urls.empty() && a.engine.model.empty())
    throw CLI::ValidationError("one of --model, --url and --compare is needed");
  if (!engine) refuse_engine_options(c);
  if (!a.other && given("--rounds"))
    throw CLI::ValidationError("--rounds needs two sides: a second --url, or --against");
  const bool server = !a.urls.empty() || (a.other && !a.other->url.empty());
  for (const char* flag : {"--vocab", "--served-model-name", "--api-key-file", "--api-key-env",
                           "--connect-timeout", "--read-timeout"}) {
    if (given(flag) && !server) throw CLI::ValidationError(fmt::format("{} needs --url", flag));
  }
  if (given("--vocab") && !a.dataset.empty()) throw CLI::ValidationError("--dataset excludes --vocab");
  if (given("--max-tokens") && a.dataset.empty())
    throw CLI::ValidationError("--max-tokens needs --dataset: a workload draws its lengths");
}

void add_bench_serve(CLI::App& bench, BenchServeArgs& a) {
  CLI::App& c = *add_command(
      bench, "serve",
      "Run many requests at once and measure what each of their users would see.\n\n"
      "The engine runs in this process (--model), or a server with OpenAI's protocol is asked (--url). A "
      "closed loop keeps\n"
      "--concurrency requests open; an open loop (--rate) sends them at random times whether or not earlier "
      "ones are done,\n"
      "as independent users do. Workloads:\n"
      "  uniform     128 tokens in, 64 out\n"
      "  mixed       prompt lengths log-normal (median 96, sigma 1.2), outputs log-normal (median 48, sigma "
      "0.8)\n"
      "  multi-turn  conversations of four turns; all begin with the same 192 tokens; with --rate these "
      "arrive\n"
      "or the lines of --dataset: {\"prompt\": ..., \"max_tokens\": N} or {\"messages\": [...], ...}, as "
      "JSON.\n"
      "The same seed gives the same requests. End tokens are ignored, so that every output has its drawn "
      "length;\n"
      "requests that the context is too short for are cut, and a line says how many.\n"
      "TTFT is the time to the first token, ITL each gap between two tokens, TPOT a request's mean gap.\n\n"
      "Two sides are compared when --url is given twice or --against says what is other: they take turns, "
      "each round with\n"
      "new requests, the same for both. --compare puts two finished runs side by side.",
      "Examples:\n"
      "  vivace bench serve --model model.gguf --workload mixed --requests 32 --concurrency 8 --report "
      "report.html\n"
      "  vivace bench serve --model model.gguf --workload uniform --rate 0.5 --json result.json\n"
      "  vivace bench serve --url http://127.0.0.1:8000 --rate 2 --slo ttft=500ms,tpot=50ms\n"
      "  vivace bench serve --url http://127.0.0.1:8000 --dataset prompts.jsonl --api-key-file key\n"
      "  vivace bench serve --model model.gguf --against \"--max-batch 4\" --report "
      "compare.html\n"
      "  vivace bench serve --compare before.json after.json");
  add_url(c,
          "A server; twice: two servers that take turns. With --model, its tokenizer alone is used: prompts "
          "are\ntoken ids of exact length, else text of about that length",
          a.urls);
  const auto against = std::make_shared<std::string>();
  filled(
      c, "--against", "FLAGS",
      "Compare with this: flags of the engine that differ, such as \"--max-batch 4\", or --url",
      *against);
  c.add_option("--compare", a.compare_files, "Two files of --json, side by side; nothing is run")
      ->type_name("FILE")
      ->expected(2);
  integer(c, "--rounds", 1, 1000, "Comparison: turns of each side [3]", [&](int64_t n) { a.rounds = n; });
  auto* workload = add(
      c, "--workload", "NAME", "uniform, mixed or multi-turn [mixed]",
      [](const std::string& text) -> Result<std::string> {
        VIVACE_TRY(bench::workload_from_name(text).status());
        return text;
      },
      [&](std::string text) { a.workload = std::move(text); });
  filled(c, "--dataset", "FILE", "Requests from this file, a JSON object per line", a.dataset)
      ->excludes(workload);
  integer(c, "--max-tokens", 1, 1 << 20, "Output of a line of --dataset without max_tokens [128]",
          [&](int64_t n) { a.max_tokens = n; });
  auto* vocab = integer(c, "--vocab", 1, std::numeric_limits<int32_t>::max(),
                        "Prompts of random token ids below N, for servers without a tokenizer",
                        [&](int64_t n) { a.vocab = n; });
  c.add_flag("--chat", a.chat, "Send text as the message of a user, to /v1/chat/completions")
      ->excludes(vocab);
  c.add_flag("--stop-at-eos", a.stop_at_eos, "Outputs end at the model's end token");
  integer(c, "--requests", 1, 1000000, "Requests to send [64; each line of --dataset once]",
          [&](int64_t n) { a.requests = n; });
  auto* concurrency = integer(c, "--concurrency", 1, 100000, "Closed loop: requests open at once [8]",
                              [&](int64_t n) { a.concurrency = n; });
  number(c, "--rate", 1e-3, 1e6, false, "Open loop: requests per second, Poisson", [&](double x) {
    a.rate = x;
  })->excludes(concurrency);
  integer(c, "--seed", 0, kAny, "Of lengths, prompts, arrivals and draws [0]",
          [&](int64_t n) { a.seed = static_cast<uint64_t>(n); });
  number(c, "--temperature", 0, kMostFp32, false, "0 takes the most likely token [0]",
         [&](double x) { a.temperature = x; });
  add(
      c, "--slo", "BOUNDS", "Goodput: requests within these, such as ttft=500ms,tpot=50ms (and e2e)",
      [](const std::string& text) { return bench::Slo::parse(text); }, [&](bench::Slo slo) { a.slo = slo; });
  c.add_flag("--watch", a.watch, "Show the text of one request at a time as it streams (on standard error)");
  filled(c, "--json", "FILE", "Write all results to this file; - is standard output", a.json_file);
  filled(c, "--report", "FILE", "Write one self-contained HTML page with plots", a.report_file);

  const std::string group = "Server";
  filled(c, "--served-model-name", "NAME", "The model to ask for [the first of /v1/models]",
         a.served_model_name)
      ->group(group);
  auto* key_file =
      filled(c, "--api-key-file", "FILE", "Its first line is sent as the key", a.api_key_file)->group(group);
  filled(c, "--api-key-env", "NAME", "This environment variable is sent as the key", a.api_key_variable)
      ->group(group)
      ->excludes(key_file);
  number(c, "--connect-timeout", 0, 86400, true, "Seconds until a connection stands [10]", [&](double x) {
    a.connect_timeout_s = x;
  })->group(group);
  number(c, "--read-timeout", 0, 86400, true, "Seconds without a byte from the server [300]", [&](double x) {
    a.read_timeout_s = x;
  })->group(group);
  add_engine(c, a.engine);
  c.get_option("--model")->required(false);
  c.callback([&a, &c, against] { check_bench_serve(c, a, *against); });
}

void add_bench(CLI::App& app, BenchServeArgs& a, BenchOpsArgs& ops, BenchStepArgs& step) {
  CLI::App& bench = *add_command(
      app, "bench", "Measure the engine under load, decode steps of a model, or single operators.", "");
  bench.require_subcommand(1);
  add_bench_step(bench, step);
  add_bench_ops(bench, ops);
  add_bench_serve(bench, a);
}

void add_ops_schedule(CLI::App& ops, OpsScheduleArgs& a) {
  constexpr bench::LengthLimits kLimits{
      .most_requests = 65536, .least_tokens = 0, .most_tokens = std::numeric_limits<int32_t>::max()};
  CLI::App& c = *add_command(
      ops, "schedule",
      "Draw how a GPU's decode step of these requests is cut, and say how even the cut is.\n\n"
      "The keys of a request and KV head, a unit, are read in tiles. decode_schedule lays all units end to "
      "end and\n"
      "cuts them into a run of equal weight per worker, a warp or a CTA: a tile weighs 1, starting a unit "
      "what it "
      "takes\nin tiles. A "
      "unit that several workers share leaves a partial result of each, to be merged. No GPU is needed: the "
      "CPU's\n"
      "row makes the same map. Shares of time take it that a tile lasts equally long everywhere, and that "
      "parts\n"
      "which begin inside a unit start for nothing, as the rule does.\n\n"
      "--json lists each worker's pieces. Equal ones that follow each other are one entry: `times` whole "
      "units (by\n"
      "request, then head), or `times` parts of one unit. `slot` is where a part leaves its partial; null: a "
      "whole\n"
      "unit, which is written at once.",
      "Examples:\n"
      "  vivace ops schedule --lengths 1x128K+31x4K --heads 8/1     one long request among short ones\n"
      "  vivace ops schedule --lengths 64x4K --heads 64/8 --sms 78  a smaller GPU\n"
      "  vivace ops schedule --lengths 1x128K+31x4K --heads 8/1 --window 4096\n"
      "  vivace ops schedule --lengths 1x16K+15x64 --heads 64/8 --piece-tiles 8 --json map.json");
  add(
      c, "--lengths", "RxT[+RxT...]",
      "R requests of T keys each, this step's included; K is 1024\nAt most 65536 requests of at most "
      "2147483647",
      [kLimits, &a](const std::string& text) {
        a.lengths_text = text;
        return bench::parse_lengths(text, kLimits);
      },
      [&a](std::vector<int64_t> lengths) { a.lengths = std::move(lengths); })
      ->required();
  add(c, "--heads", "Q/KV", "Query heads and KV heads, 1 to 1024 each", parse_heads, [&a](Heads heads) {
    a.heads_q = heads.q;
    a.heads_kv = heads.kv;
  })->required();
  integer(c, "--queries", 1, 8, "Query tokens of each request [1]", [&a](int64_t n) { a.query_tokens = n; });
  integer(c, "--window", 0, std::numeric_limits<int32_t>::max(),
          "Keys that a query token sees, its own included; 0: all [0]", [&a](int64_t n) { a.window = n; });
  auto* sms = integer(c, "--sms", 1, 1024,
                      fmt::format("Multiprocessors of the GPU [{}, an H200's]", OpsScheduleArgs::kH200Sms),
                      [&a](int64_t n) { a.sms = n; });
  integer(c, "--workers", 1, 65536, "Workers that share the work [as many as the SMs hold]", [&a](int64_t n) {
    a.workers = n;
  })->excludes(sms);
  add(
      c, "--row", "ROW",
      "Row of attention_decode that the cut is for: sm90, whose workers are\nwarps of a Hopper GPU, or "
      "cuda.mma, "
      "whose workers are CTAs\n[sm90 where it takes heads, queries and pieces]",
      [](const std::string& text) -> Result<std::string> {
        if (text == kSm90Row || text == kMmaRow) return text;
        return invalid_argument("is '{}', needs {} or {}", text, kSm90Row, kMmaRow);
      },
      [&a](std::string row) { a.row = std::move(row); });
  add(
      c, "--kv-dtype", "TYPE", "Type of K and V, bf16 or fp8: how many keys a tile of sm90 has [bf16]",
      [](const std::string& text) -> Result<bool> {
        if (text == "bf16" || text == "fp8") return text == "fp8";
        return invalid_argument("is '{}', needs bf16 or fp8", text);
      },
      [&a](bool fp8) { a.fp8 = fp8; });
  integer(c, "--piece-tiles", 0, int64_t{1} << 30,
          "Cut a request at multiples of N tiles alone, so that its bits\ndo not depend on its company; 0: "
          "anywhere [0]",
          [&a](int64_t n) { a.piece_tiles = n; });
  filled(c, "--json", "FILE", "Write totals and map to this file; - is standard output", a.json_file);
  c.callback([&a] {
    const Status status = check_schedule_size(a);
    if (!status.ok()) throw CLI::ValidationError(status.message(), CLI::ExitCodes::ValidationError);
  });
}

void add_ops(CLI::App& app, OpsArgs& ops, OpsExplainArgs& explain, OpsScheduleArgs& schedule) {
  CLI::App& c = *add_command(
      app, "ops",
      "List the operators and their implementations.\n\n"
      "Each operator has an ordered table of implementations, called rows. A row states what it "
      "needs; the first\n"
      "row whose needs a call meets runs. `ops explain` says which rows a model's calls meet, `ops "
      "schedule`\n"
      "how the work of a decode step is cut.",
      "Examples:\n"
      "  vivace ops\n"
      "  vivace ops explain --model model.gguf --batch 8\n"
      "  vivace ops schedule --lengths 1x128K+31x4K --heads 8/1");
  auto* json = c.add_flag("--json", ops.json, "One JSON document instead of text");
  c.add_flag("--markdown", ops.markdown, "The page docs/generated/ops.md")->excludes(json);
  c.require_subcommand(0, 1);
  add_ops_schedule(c, schedule);
  CLI::App& e = *add_command(
      c, "explain",
      "Say for each layer of a model which row would run each operator, and why the rows before it "
      "would not: in\n"
      "a decode step, and in a prompt chunk as long as --token-budget and the context allow. "
      "Layers that agree\n"
      "are shown together. With --device cuda on a machine without a GPU, rows are those of an H200,\nin a build with CUDA.",
      "Examples:\n"
      "  vivace ops explain --model model.gguf\n"
      "  vivace ops explain --model model.gguf --batch 8 --prefer linear=reference --json");
  integer(e, "--batch", 1, 4096, "Requests in the decode step, at most --max-batch [1]",
          [&](int64_t n) { explain.batch = n; });
  e.add_flag("--json", explain.json, "One JSON document instead of a table");
  add_engine(e, explain.engine);
  e.callback([&explain] {
    if (explain.batch <= explain.engine.max_batch) return;
    throw CLI::ValidationError(fmt::format("--batch is {}, needs at most --max-batch = {}", explain.batch,
                                           explain.engine.max_batch));
  });
}

void add_doctor(CLI::App& app, DoctorArgs& a) {
  CLI::App& c = *add_command(app, "doctor",
                             "Say what this machine and this build can do: processor, instruction set, "
                             "memory, GPUs, which kinds of rows\n"
                             "were compiled in, and what to change; with --model also what this model is.",
                             "Examples:\n"
                             "  vivace doctor\n"
                             "  vivace doctor --model model.gguf --json");
  add_model(c, a.model);
  c.add_flag("--json", a.json, "One JSON document instead of text");
}

std::string command_line(int argc, char** argv) {
  std::string text;
  for (int i = 0; i < argc; ++i) {
    const std::string word = argv[i];
    const bool plain = !word.empty() && word.find_first_not_of(
                                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                            "-_./=,:+@%") == std::string::npos;
    text += (i > 0 ? " " : "");
    if (plain) {
      text += word;
      continue;
    }
    text += '\'';
    for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
    text += '\'';
  }
  return text;
}

/// The deepest command that was reached, such as "vivace bench serve".
const CLI::App* reached(const CLI::App* app, std::string& path) {
  for (;;) {
    const auto below = app->get_subcommands();
    if (below.empty()) return app;
    app = below.front();
    path += " " + app->get_name();
  }
}

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::string names_of(const std::vector<const CLI::App*>& commands) {
  std::string names;
  for (const CLI::App* known : commands) names += (names.empty() ? "" : ", ") + known->get_name();
  return names;
}

/// Of the first word that no option and no command took; "" when all were taken.
std::string unknown_word(const CLI::App& app, const CLI::App& command) {
  const std::vector<std::string> words = app.remaining(true);
  if (words.empty()) return {};
  const std::string& word = words.front();
  if (word.starts_with('-')) return fmt::format("there is no option '{}'", word);
  const std::vector<const CLI::App*> commands = commands_of(command);
  if (commands.empty()) return fmt::format("'{}' follows no option that takes it", word);
  return fmt::format("there is no command '{}', only {}", word, names_of(commands));
}

int usage_error(const std::string& path, const std::string& message) {
  std::fprintf(stderr, "%s: %s\nTry '%s --help'.\n", path.c_str(), visible(message).c_str(), path.c_str());
  return kMistake;
}

int report_usage_error(const CLI::App& app, const CLI::ParseError& error) {
  std::string path = "vivace";
  const CLI::App* command = reached(&app, path);
  const auto code = static_cast<CLI::ExitCodes>(error.get_exit_code());
  std::string message;
  // What is missing may be what was misspelt.
  if (code == CLI::ExitCodes::RequiredError || code == CLI::ExitCodes::ExtrasError)
    message = unknown_word(app, *command);
  const std::vector<const CLI::App*> commands = commands_of(*command);
  if (message.empty() && code == CLI::ExitCodes::RequiredError && !commands.empty()) {
    message = fmt::format("a command is missing, one of {}", names_of(commands));
  }
  if (message.empty()) message = error.what();
  constexpr std::string_view kAgain = ": At Most 1 required but received ";
  if (const size_t at = message.find(kAgain); at != std::string::npos) {
    message = fmt::format("{} is given {} times, needs one value", message.substr(0, at),
                          message.substr(at + kAgain.size()));
  }
  return usage_error(path, message);
}

/// Help or the version, unless they were asked of a command that is not there.
int report_success(const CLI::App& app, const CLI::Success& success) {
  std::string path = "vivace";
  const CLI::App* command = reached(&app, path);
  const std::string message = commands_of(*command).empty() ? "" : unknown_word(app, *command);
  return message.empty() ? app.exit(success) : usage_error(path, message);
}

}  // namespace

Parsed parse_command_line(int argc, char** argv) {
  CLI::App app(
      "Vivace decodes large language models: a library of operators, an engine with continuous batching over "
      "paged\n"
      "keys and values, and this program.\n\n"
      "Results go to standard output, progress and messages to standard error. Exit codes: 0 success, 1 "
      "failure,\n"
      "2 a mistake in the command line.",
      "vivace");
  app.footer(
      "Start here:\n"
      "  vivace doctor                                            what this machine can do\n"
      "  vivace generate --model model.gguf --chat \"Hello\"        talk to a model\n"
      "  vivace serve --model model.gguf                          serve it over HTTP\n"
      "  vivace bench serve --model model.gguf --report out.html  measure it under load\n"
      "  vivace ops explain --model model.gguf                    which code runs, and why\n\n"
      "Each command has its own --help with examples; `vivace help bench step` is the same.");
  app.get_formatter()->column_width(30);
  app.set_version_flag("--version", std::string("vivace ") + VIVACE_VERSION);
  app.require_subcommand(1);
  GenerateArgs generate;
  ScoreArgs score;
  TokenizeArgs tokenize;
  QuantizeArgs quantize;
  ServeArgs serve;
  BenchServeArgs bench;
  BenchOpsArgs bench_ops;
  BenchStepArgs bench_step;
  OpsArgs ops;
  OpsExplainArgs explain;
  OpsScheduleArgs schedule;
  DoctorArgs doctor;
  add_generate(app, generate);
  add_score(app, score);
  add_tokenize(app, tokenize);
  add_quantize(app, quantize);
  add_serve(app, serve);
  add_bench(app, bench, bench_ops, bench_step);
  add_ops(app, ops, explain, schedule);
  add_doctor(app, doctor);
  try {
    if (argc > 1 && std::string_view(argv[1]) == "help") {  // vivace help bench serve
      std::vector<std::string> words{"--help"};             // read from the back
      for (int i = argc; i-- > 2;) words.emplace_back(argv[i]);
      app.parse(std::move(words));
    } else {
      app.parse(argc, argv);
    }
  } catch (const CLI::Success& success) {
    return {std::monostate{}, report_success(app, success)};
  } catch (const CLI::ParseError& error) {
    return {std::monostate{}, report_usage_error(app, error)};
  }
  bench.command = bench_step.command = command_line(argc, argv);
  if (app.got_subcommand("generate")) return {generate};
  if (app.got_subcommand("score")) return {score};
  if (app.got_subcommand("tokenize")) return {tokenize};
  if (app.got_subcommand("quantize")) return {quantize};
  if (app.got_subcommand("serve")) return {serve};
  if (app.got_subcommand("bench")) {
    if (app.get_subcommand("bench")->got_subcommand("ops")) return {bench_ops};
    if (app.get_subcommand("bench")->got_subcommand("step")) return {bench_step};
    return {bench};
  }
  if (app.got_subcommand("doctor")) return {doctor};
  if (app.get_subcommand("ops")->got_subcommand("explain")) return {explain};
  if (app.get_subcommand("ops")->got_subcommand("schedule")) return {schedule};
  return {ops};
}

}  // namespace vivace::cli
