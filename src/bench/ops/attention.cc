// attention_decode and attention_prefill over shuffled pages of random keys and values.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "src/bench/ops/memory.h"
#include "src/bench/ops/suites.h"
#include "src/core/error.h"
#include "src/core/number.h"
#include "src/device/random.h"
#include "src/ops/attention/reference.h"
#include "vivace/attention_decode.h"
#include "vivace/attention_prefill.h"

namespace vivace::bench {

namespace {

struct Shape {
  std::vector<int64_t> lengths;
  int64_t heads_q, heads_kv, head_dim, page, queries, window;
  bool fp8, prefill, early;

  int64_t keys() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }
  int64_t rows(int64_t request) const { return prefill ? lengths[request] : queries; }
  int64_t tokens() const { return prefill ? keys() : queries * std::ssize(lengths); }
  /// Keys of a request that any of its rows sees.
  int64_t seen(int64_t request) const {
    const int64_t keys = lengths[request];
    return window > 0 ? std::min(keys, window + rows(request) - 1) : keys;
  }
  int64_t kv_bytes() const { return 2 * keys() * heads_kv * head_dim * (fp8 ? 1 : 2); }
  int64_t seen_bytes() const {
    int64_t all = 0;
    for (int64_t r = 0; r < std::ssize(lengths); ++r) all += seen(r);
    return 2 * all * heads_kv * head_dim * (fp8 ? 1 : 2);
  }
};

int64_t sets_of(const Shape& shape) {
  constexpr int64_t kColdBytes = 400'000'000;
  return std::clamp<int64_t>((kColdBytes + shape.seen_bytes() - 1) / shape.seen_bytes(), 2, 32);
}

Result<Shape> shape_of(const OpWorkload& w, bool prefill) {
  const int64_t heads_q = w.number("heads_q"), heads_kv = w.number("heads_kv"), page = w.number("page");
  VIVACE_TRY(check_heads(w));
  if (page < 1 || page > 256 || !std::has_single_bit(static_cast<uint64_t>(page))) {
    return refuse_field(w, "page", "a power of two from 1 to 256");
  }
  VIVACE_TRY_ASSIGN(const size_t kv, choice_of(w, "kv", {"bf16", "fp8"}));
  VIVACE_TRY_ASSIGN(std::vector<int64_t> lengths, parse_case_lengths(w.name));
  Shape shape{
      std::move(lengths), heads_q, heads_kv, w.number("head_dim"), page, 1, 0, kv == 1, prefill, false};
  if (!prefill) {
    VIVACE_TRY(check_field(w, "queries", 1, 8));
    VIVACE_TRY(check_field(w, "window", 0, INT32_MAX));
    VIVACE_TRY(check_field(w, "early", 0, 1));
    shape.queries = w.number("queries");
    shape.window = w.number("window");
    shape.early = w.number("early") == 1;
    for (const int64_t length : shape.lengths) {
      if (length < shape.queries) return refuse_field(w, "queries", "no more than a request has tokens");
    }
  }
  if (shape.keys() > INT32_MAX) {
    return invalid_argument("{} {}: its requests have {} tokens in all, needs at most {}", w.suite, w.name,
                            shape.keys(), INT32_MAX);
  }
  const double queries =
      static_cast<double>(shape.tokens()) * static_cast<double>(heads_q * shape.head_dim) * 4;
  VIVACE_TRY(check_memory(
      w, static_cast<double>(sets_of(shape)) * (static_cast<double>(shape.kv_bytes()) + queries)));
  return shape;
}

/// The inputs of one set. Sets share nothing.
struct Set {
  AttentionArgs args;
  Tensor schedule;
};

class PreparedAttention final : public PreparedOp {
 public:
  PreparedAttention(Shape shape, int64_t sets) : shape_(std::move(shape)), sets_(static_cast<size_t>(sets)) {}

  Status prepare(const Stream& stream) {
    for (size_t i = 0; i < sets_.size(); ++i) VIVACE_TRY(make_set(sets_[i], i + 1, stream));
    VIVACE_TRY_ASSIGN(const int64_t scratch,
                      shape_.prefill ? Result<int64_t>(int64_t{0})
                                     : attention_decode_workspace_bytes(decode_args(sets_[0]), stream));
    if (scratch > 0) {
      VIVACE_TRY_ASSIGN(workspace_, memory_.make(DType::u8, {scratch}, stream));
    }
    choice_ = shape_.prefill ? attention_prefill_explain(prefill_args(sets_[0]), stream)
                             : attention_decode_explain(decode_args(sets_[0]), stream);
    return {};
  }

  int64_t sets() const override { return std::ssize(sets_); }
  Status call(int64_t set, const Stream& stream) override {
    if (shape_.prefill) return attention_prefill(prefill_args(sets_[set]), stream);
    return attention_decode(decode_args(sets_[set]), stream);
  }
  std::string row() const override { return choice_.row; }

  Floor floor() const override {
    double pairs = 0;
    for (int64_t r = 0; r < std::ssize(shape_.lengths); ++r) {
      const auto keys = static_cast<double>(shape_.seen(r));
      pairs += shape_.prefill ? keys * (keys + 1) / 2 : keys * static_cast<double>(shape_.queries);
    }
    const auto width = static_cast<double>(shape_.heads_q * shape_.head_dim);
    const double element = shape_.fp8 ? 1 : 2;
    return {.bytes = static_cast<double>(shape_.seen_bytes()) +
                     static_cast<double>(shape_.tokens()) * width * (element + 2),
            .flops = 4 * pairs * width,
            .flop_rate = shape_.fp8 ? kFp8Rate : kBf16Rate};
  }

  /// The last row of some requests, all heads.
  Result<std::optional<double>> max_abs_error(const Stream& stream) override {
    const Set& set = sets_[0];
    VIVACE_TRY_ASSIGN(const HostTensor table, download(set.args.page_table, stream));
    double worst = 0;
    const int64_t requests = std::ssize(shape_.lengths);
    for (int64_t r = 0; r < requests; r += std::max<int64_t>(1, requests / 2)) {
      VIVACE_TRY_ASSIGN(const double error, error_of(set, table.tensor, r, stream));
      worst = larger(worst, error);
    }
    return std::optional<double>(worst);
  }

 private:
  Status make_set(Set& set, uint64_t seed, const Stream& stream) {
    const Shape& s = shape_;
    const auto requests = static_cast<int64_t>(s.lengths.size());
    const DType type = s.fp8 ? DType::fp8_e4m3 : DType::bf16;
    int64_t pages = 0, max_pages = 1;
    std::vector<int32_t> lengths, starts{0};
    for (int64_t r = 0; r < requests; ++r) {
      const int64_t needed = (s.lengths[r] + s.page - 1) / s.page;
      pages += needed;
      max_pages = std::max(max_pages, needed);
      lengths.push_back(static_cast<int32_t>(s.lengths[r]));
      starts.push_back(starts.back() + static_cast<int32_t>(s.rows(r)));
    }
    std::mt19937_64 rng(seed);
    std::vector<int32_t> order(static_cast<size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<int32_t> table(static_cast<size_t>(requests * max_pages), -1);
    size_t next = 0;
    for (int64_t r = 0; r < requests; ++r) {
      for (int64_t p = 0; p * s.page < s.lengths[r]; ++p) table[r * max_pages + p] = order[next++];
    }
    // e4m3 of deviation 1 keeps three bits; scales bring keys and values to the deviation of the bf16 case.
    AttentionArgs& a = set.args;
    a.window = s.window;
    VIVACE_TRY_ASSIGN(a.q, memory_.random(type, {s.tokens(), s.heads_q, s.head_dim}, 1, 10 * seed, stream));
    VIVACE_TRY_ASSIGN(
        a.k, memory_.random(type, {pages, s.page, s.heads_kv, s.head_dim}, 1, 10 * seed + 1, stream));
    VIVACE_TRY_ASSIGN(
        a.v, memory_.random(type, {pages, s.page, s.heads_kv, s.head_dim}, 1, 10 * seed + 2, stream));
    VIVACE_TRY_ASSIGN(a.output, memory_.make(DType::bf16, {s.tokens(), s.heads_q, s.head_dim}, stream));
    VIVACE_TRY_ASSIGN(a.page_table, memory_.copy_of(table, DType::i32, {requests, max_pages}, stream));
    VIVACE_TRY_ASSIGN(a.kv_lengths, memory_.copy_of(lengths, DType::i32, {requests}, stream));
    VIVACE_TRY_ASSIGN(a.query_start, memory_.copy_of(starts, DType::i32, {requests + 1}, stream));
    if (s.fp8) {
      std::vector<float> ones(static_cast<size_t>(s.tokens() * s.heads_q), 1.f);
      VIVACE_TRY_ASSIGN(a.q_scale, memory_.copy_of(ones, DType::f32, {s.tokens(), s.heads_q}, stream));
      VIVACE_TRY_ASSIGN(a.k_scale, memory_.copy_of(ones, DType::f32, {1}, stream));
      VIVACE_TRY_ASSIGN(a.v_scale, memory_.copy_of(ones, DType::f32, {1}, stream));
    }
    if (s.prefill) return {};
    params_.window = s.window;
    VIVACE_TRY_ASSIGN(params_, attention_decode_schedule_params(decode_args(set), stream));
    VIVACE_TRY_ASSIGN(set.schedule,
                      memory_.make(DType::i32, {decode_schedule_ints(requests, params_.workers)}, stream));
    return decode_schedule({.kv_lengths = a.kv_lengths,
                            .query_start = a.query_start,
                            .params = params_,
                            .schedule = set.schedule},
                           stream);
  }

  AttentionDecodeArgs decode_args(const Set& set) const {
    return {.attention = set.args,
            .max_query_tokens = shape_.queries,
            .params = params_,
            .schedule = set.schedule,
            .old_keys_ready = shape_.early,
            .workspace = workspace_};
  }
  AttentionPrefillArgs prefill_args(const Set& set) const {
    return {.attention = set.args,
            .max_query_tokens = *std::max_element(shape_.lengths.begin(), shape_.lengths.end())};
  }

  /// Of the last row of one request: its pages are copied to the host, one after the other.
  Result<double> error_of(const Set& set, const Tensor& table, int64_t request, const Stream& stream) const {
    const Shape& s = shape_;
    const int64_t keys = s.lengths[request], pages = (keys + s.page - 1) / s.page;
    int64_t row = s.rows(request) - 1;
    for (int64_t r = 0; r < request; ++r) row += s.rows(r);
    std::vector<HostTensor> kept;
    std::vector<int32_t> ids(static_cast<size_t>(pages)), starts{0, 1};
    std::iota(ids.begin(), ids.end(), 0);
    const auto gather = [&](const Tensor& cache) -> Result<Tensor> {
      HostTensor all;
      all.tensor = Tensor(nullptr, cache.dtype, {pages, s.page, s.heads_kv, s.head_dim});
      all.memory.resize(static_cast<size_t>(all.tensor.bytes()));
      all.tensor.data = all.memory.data();
      for (int64_t p = 0; p < pages; ++p) {
        const Tensor from = cache.at(table.at(request).as<int32_t>()[p]);
        VIVACE_TRY(device::copy_to_host(all.tensor.at(p).data, from.data, from.bytes(), stream));
      }
      VIVACE_TRY(device::synchronize(stream));
      kept.push_back(std::move(all));
      return kept.back().tensor;
    };
    const auto one = [&](const Tensor& rows) -> Result<Tensor> {
      if (!rows.present()) return Tensor();
      VIVACE_TRY_ASSIGN(HostTensor host, download(rows.rows(row, 1), stream));
      kept.push_back(std::move(host));
      return kept.back().tensor;
    };
    kept.reserve(8);
    AttentionArgs args;
    VIVACE_TRY_ASSIGN(args.k, gather(set.args.k));
    VIVACE_TRY_ASSIGN(args.v, gather(set.args.v));
    VIVACE_TRY_ASSIGN(args.q, one(set.args.q));
    VIVACE_TRY_ASSIGN(args.q_scale, one(set.args.q_scale));
    VIVACE_TRY_ASSIGN(const Tensor got, one(set.args.output));
    float unit = 1;
    int32_t length = static_cast<int32_t>(keys);
    if (s.fp8) args.k_scale = args.v_scale = Tensor(&unit, DType::f32, {1});
    args.page_table = Tensor(ids.data(), DType::i32, {1, pages});
    args.kv_lengths = Tensor(&length, DType::i32, {1});
    args.query_start = Tensor(starts.data(), DType::i32, {2});
    args.window = s.window;
    std::vector<float> want(static_cast<size_t>(s.heads_q * s.head_dim));
    args.output = Tensor(want.data(), DType::f32, {1, s.heads_q, s.head_dim});
    // A query head each, so that they are computed side by side.
    const auto heads = [](Tensor tensor, int dimension, int64_t begin, int64_t count) {
      if (!tensor.present() || tensor.rank <= dimension) return tensor;
      tensor.data = tensor.as<char>() + begin * tensor.stride[dimension] * info_of(tensor.dtype).block_bytes;
      tensor.shape[dimension] = count;
      return tensor;
    };
    const int64_t group = s.heads_q / s.heads_kv;
    check_threads().parallel_for(s.heads_q, [&](int64_t head, int) {
      AttentionArgs one = args;
      for (Tensor* cache : {&one.k, &one.v}) *cache = heads(*cache, 2, head / group, 1);
      for (Tensor* rows : {&one.q, &one.q_scale, &one.output}) *rows = heads(*rows, 1, head, 1);
      attention_reference(one);
    });
    double worst = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      worst = larger(worst, std::abs(load(got.dtype, got.data, static_cast<int64_t>(i)) - double{want[i]}));
    }
    return worst;
  }

  Shape shape_;
  std::vector<Set> sets_;
  DecodeScheduleParams params_;
  DeviceTensors memory_;
  Tensor workspace_;
  Choice choice_;
};

Result<std::unique_ptr<PreparedOp>> prepare(const OpWorkload& w, const Stream& stream, bool prefill) {
  VIVACE_TRY_ASSIGN(Shape shape, shape_of(w, prefill));
  const int64_t sets = sets_of(shape);
  return prepared<PreparedAttention>(stream, std::move(shape), sets);
}

std::vector<OpWorkload> workloads(std::string_view suite, std::initializer_list<const char*> cases,
                                  bool decode) {
  std::vector<OpWorkload> all;
  for (const auto& [heads_q, heads_kv] : {std::pair{8, 1}, {64, 8}}) {
    for (const char* kv : {"bf16", "fp8"}) {
      for (const char* name : cases) {
        OpWorkload w{.suite = std::string(suite), .name = name, .fields = {}};
        w.with("kv", std::string(kv)).with("heads_q", int64_t{heads_q}).with("heads_kv", int64_t{heads_kv});
        w.with("head_dim", int64_t{128}).with("page", int64_t{64});
        if (decode) w.with("queries", int64_t{1}).with("window", int64_t{0}).with("early", int64_t{1});
        all.push_back(std::move(w));
      }
    }
  }
  return all;
}

}  // namespace

const OpSuite kAttentionDecodeSuite = {
    "attention_decode",
    "queries tokens per request over a paged cache; early=1 loads old keys before the kernel before has "
    "ended",
    [] {
      return workloads("attention_decode",
                       {"64x0.5K", "64x4K", "32x128+32x4K", "1x16K+15x64", "2x32K+30x4K", "1x64K+7x4K",
                        "1x64K+15x4K", "1x64K+31x4K", "1x128K+31x4K"},
                       true);
    },
    [](const OpWorkload& w) { return shape_of(w, false).status(); },
    [](const OpWorkload& w, const Stream& stream) { return prepare(w, stream, false); }};

const OpSuite kAttentionPrefillSuite = {
    "attention_prefill", "causal attention of whole prompts over a paged cache",
    [] {
      return workloads("attention_prefill", {"8x1024", "4x4096", "2x8192", "1x32768"}, false);
    },
    [](const OpWorkload& w) { return shape_of(w, true).status(); },
    [](const OpWorkload& w, const Stream& stream) { return prepare(w, stream, true); }};

}  // namespace vivace::bench
