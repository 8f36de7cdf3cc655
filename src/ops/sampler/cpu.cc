// One token per row         rows over threads, no full sort
//
// Two numbers for a row of V logits
//   bytes  4 V or 2 V   read once from memory, then some passes within the second-level cache
//   flops  20 V         for each pass with exponentials: one for the log-probability, one for top-p or a free draw
//
// Filters are thresholds. The k-th largest of the chunks' maxima bounds the k-th largest logit from below; a weight
// below (1 - top_p) / V of the total cannot be needed for top_p of it. Few logits pass; they are sorted, or parted
// around pivots if many. What the filters leave is described by its last member in falling order, and the draw walks
// the row once more in order of ids.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "src/core/number.h"
#include "src/core/workspace.h"
#include "src/cpu/thread_pool.h"
#include "src/ops/sampler/random.h"
#include "src/ops/sampler/scan.h"
#include "src/ops/sampler/table.h"

namespace vivace {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The scratch of one worker.
struct Scratch {
  float* row;     ///< [chunks * kSampleChunk]
  float* maxima;  ///< [chunks * kMaximaPerChunk]
  double* sums;   ///< [chunks]
  /// [vocab or more]; the same memory parts maxima.
  Candidate* candidates;

  static int64_t candidate_count(int64_t vocab) {
    return std::max(vocab, sample_chunks(vocab) * kMaximaPerChunk);
  }

  static int64_t bytes(int64_t vocab) {
    const int64_t chunks = sample_chunks(vocab);
    const int64_t raw = chunks * (kSampleChunk + kMaximaPerChunk) * int64_t{sizeof(float)} +
                        chunks * int64_t{sizeof(double)} +
                        candidate_count(vocab) * int64_t{sizeof(Candidate)};
    return whole_lines(raw);
  }
  Scratch(uint8_t* memory, int64_t vocab) {
    const int64_t chunks = sample_chunks(vocab);
    row = reinterpret_cast<float*>(memory);
    maxima = row + chunks * kSampleChunk;
    sums = reinterpret_cast<double*>(maxima + chunks * kMaximaPerChunk);
    candidates = reinterpret_cast<Candidate*>(sums + chunks);
  }
};

/// From the most likely to the least; ties by ascending id.
bool falls(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

/// The `k` most likely tokens of the row in falling order, at the front of the candidates; returns how many (fewer
/// only if the vocabulary is smaller).
int64_t most_likely(const Scratch& s, int64_t vocab, int64_t k, Softmax softmax) {
  k = std::min(k, vocab);
  if (k == 0) return 0;
  const int64_t maxima = sample_chunks(vocab) * kMaximaPerChunk;
  float threshold = -kInfinity;
  if (k <= maxima / 2) {
    // The candidates' memory holds the copy that is parted.
    float* copy = reinterpret_cast<float*>(s.candidates);
    std::copy(s.maxima, s.maxima + maxima, copy);
    std::nth_element(copy, copy + (k - 1), copy + maxima, std::greater<float>());
    threshold = copy[k - 1];
  }
  const int64_t count = sample::collect(s.row, vocab, threshold, softmax, s.candidates);
  if (count > 2 * k) std::nth_element(s.candidates, s.candidates + k, s.candidates + count, falls);
  std::sort(s.candidates, s.candidates + (count > 2 * k ? k : count), falls);
  return k;
}

void bias_and_penalise(const SampleRow& params, const Scratch& s, int64_t vocab) {
  float* row = s.row;
  for (size_t i = 0; i < params.bias_ids.size(); ++i) {
    const int32_t id = params.bias_ids[i];
    if (id < 0 || id >= vocab) continue;
    // A ban holds whatever the logit.
    row[id] = params.bias_values[i] == -kInfinity ? -kInfinity : row[id] + params.bias_values[i];
  }
  if (params.allowed_bits != nullptr) {
    for (int64_t id = 0; id < vocab; ++id) {
      if (!params.is_allowed(id)) row[id] = -kInfinity;
    }
  }
  if (!params.penalised()) return;
  const auto penalise = [&](int64_t id) {
    row[id] = penalised_logit(row[id], params.params, params.count(id), params.in_prompt(id));
  };
  if (params.output_counts != nullptr) {
    for (int64_t id = 0; id < vocab; ++id) {
      if (params.output_counts[id] > 0) penalise(id);
    }
  }
  if (params.prompt_bits == nullptr) return;
  for (int64_t word = 0; word < (vocab + 31) / 32; ++word) {
    for (uint32_t bits = params.prompt_bits[word]; bits != 0; bits &= bits - 1) {
      const int64_t id = word * 32 + std::countr_zero(bits);
      if (id < vocab && params.count(id) <= 0) penalise(id);
    }
  }
}

/// The lowest id that holds the maximum.
int32_t argmax(const Scratch& s, int64_t vocab, float max) {
  const int64_t chunks = sample_chunks(vocab);
  const float* first = std::find(s.maxima, s.maxima + chunks * kMaximaPerChunk, max);
  const int64_t start = (first - s.maxima) / kMaximaPerChunk * kSampleChunk;
  return static_cast<int32_t>(std::find(s.row + start, s.row + vocab, max) - s.row);
}

/// The first candidates in falling order (`sorted` of them are), while the weights before a candidate sum to less than
/// `wanted`; returns the last one kept.
Candidate last_within(const Candidate* sorted, int64_t count, double wanted) {
  double before = sorted[0].weight;
  int64_t kept = 1;
  while (kept < count && before < wanted) before += sorted[kept++].weight;
  return sorted[kept - 1];
}

/// The same for candidates in any order: parts them around pivots until the rest is worth sorting.
Candidate last_within_unsorted(Candidate* all, int64_t count, double wanted) {
  constexpr int64_t kSortable = 64;
  int64_t low = 0, high = count;
  while (high - low > kSortable) {
    Candidate three[] = {all[low], all[low + (high - low) / 2], all[high - 1]};
    std::sort(three, three + 3, falls);
    const Candidate pivot = three[1];
    // Neither part is empty: one of the three falls before the pivot, and the pivot itself does not.
    Candidate* middle =
        std::partition(all + low, all + high, [&](const Candidate& c) { return falls(c, pivot); });
    double mass = 0;
    for (const Candidate* c = all + low; c < middle; ++c) mass += c->weight;
    if (mass >= wanted) {
      high = middle - all;
    } else {
      wanted -= mass;
      low = middle - all;
    }
  }
  std::sort(all + low, all + high, falls);
  return last_within(all + low, high - low, wanted);
}

/// A draw among all tokens.
int32_t draw_any(const Scratch& s, int64_t vocab, Softmax softmax, double u) {
  const int64_t chunks = sample_chunks(vocab);
  const double target = u * sample::sum_row(s.row, chunks, softmax, s.sums);
  double before = 0;
  int64_t chunk = 0, last = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    if (s.sums[c] == 0) continue;
    if (c > last) before += s.sums[last];
    last = chunk = c;
    if (before + s.sums[c] > target) break;
  }
  float weights[kSampleChunk];
  sample::weigh_chunk(s.row + chunk * kSampleChunk, softmax, weights);
  int64_t id = 0;
  for (int64_t i = 0; i < kSampleChunk; ++i) {
    if (weights[i] == 0) continue;
    before += weights[i];
    id = chunk * kSampleChunk + i;
    if (before > target) break;
  }
  return static_cast<int32_t>(id);
}

/// A draw among the tokens down to `last` in falling order whose weight is at least min_p.
int32_t draw_down_to(const Scratch& s, int64_t vocab, Softmax softmax, Candidate last, double min_p,
                     double u) {
  const int64_t count = sample::collect(s.row, vocab, last.logit, softmax, s.candidates);
  const auto kept = [&](const Candidate& c) { return !falls(last, c) && c.weight >= min_p && c.weight > 0; };
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += kept(s.candidates[i]) ? s.candidates[i].weight : 0;
  double sum = 0;
  int32_t id = last.id;
  for (int64_t i = 0; i < count; ++i) {
    if (!kept(s.candidates[i])) continue;
    sum += s.candidates[i].weight;
    id = s.candidates[i].id;
    if (sum > u * total) break;
  }
  return id;
}

/// A logit below every token whose weight is at least `weight`, by more than rounding can move either.
float logit_below(double weight, double max, double temperature) {
  if (std::isinf(max)) return static_cast<float>(max);
  const double distance = -std::log(weight) * temperature;
  const double slack = 0x1p-20 * (std::abs(max) + distance);
  return static_cast<float>(std::max<double>(-std::numeric_limits<float>::max(), max - distance - slack));
}

int32_t draw(const SampleRow& row, const Scratch& s, int64_t vocab, float max) {
  const SampleParams& params = row.params;
  // Clamped so that no product below is 0 * inf; both ends have long reached their limits: the equals of the
  // maximum, and all tokens alike.
  using Limits = std::numeric_limits<float>;
  const double inverse = std::clamp<double>(1 / params.temperature, Limits::min(), Limits::max());
  const Softmax softmax{max, static_cast<float>(inverse)};
  const double u = draw_uniform(row.seed, row.position);
  const int32_t least = static_cast<int32_t>(vocab - 1);
  if (params.top_k > 0 && params.top_k < vocab) {
    const int64_t count = most_likely(s, vocab, params.top_k, softmax);
    Candidate last = s.candidates[count - 1];
    if (params.top_p < 1) {
      double total = 0;
      for (int64_t i = 0; i < count; ++i) total += s.candidates[i].weight;
      last = last_within(s.candidates, count, params.top_p * total);
    }
    return draw_down_to(s, vocab, softmax, last, params.min_p, u);
  }
  if (params.top_p < 1) {
    const double total = sample::sum_row(s.row, sample_chunks(vocab), softmax, s.sums);
    // What weighs less than `needless` cannot be needed. Mostly the set ends far above it, so a shorter list is
    // tried first: any list that sums to enough holds the set.
    const double wanted = params.top_p * total;
    const double needless = std::min(1.0, (1 - params.top_p) * total / static_cast<double>(vocab));
    int64_t count = 0;
    double mass = 0;
    for (double weight : {std::max(needless, 0x1p-8), std::max(needless, 0x1p-13), needless}) {
      if (mass >= wanted) break;
      const float threshold = logit_below(weight, max, params.temperature);
      count = sample::collect(s.row, vocab, threshold, softmax, s.candidates);
      mass = 0;
      for (int64_t i = 0; i < count; ++i) mass += s.candidates[i].weight;
    }
    const Candidate last = last_within_unsorted(s.candidates, count, wanted);
    return draw_down_to(s, vocab, softmax, last, params.min_p, u);
  }
  if (params.min_p > 0) {
    const Candidate last{logit_below(params.min_p, max, params.temperature), 0, least};
    return draw_down_to(s, vocab, softmax, last, params.min_p, u);
  }
  return draw_any(s, vocab, softmax, u);
}

void sample_row(const SamplerArgs& args, int64_t r, const Scratch& s) {
  const SampleRow params = sample_row_of(args, r);
  const int64_t vocab = args.logits.shape[1], chunks = sample_chunks(vocab);
  const Tensor source = args.logits.at(r);
  sample::load_row(source.dtype, source.data, vocab, s.row);
  const RowBounds raw = sample::bound_row(s.row, chunks, s.maxima);
  bool valid = !raw.has_nan && raw.max > -kInfinity;

  const int64_t width = args.top_ids.present() ? args.top_ids.shape[1] : 0;
  const Softmax plain{raw.max, 1};
  double log_sum = 0;
  if (valid && (args.logprobs.present() || width > 0)) {
    log_sum = std::log(sample::sum_row(s.row, chunks, plain, s.sums));
  }
  const auto logprob = [&](float logit) {
    const double below = logit == raw.max ? 0 : double{logit} - raw.max;
    return static_cast<float>(below - log_sum);
  };
  int64_t listed = 0;
  int32_t* top_ids = width > 0 ? args.top_ids.at(r).as<int32_t>() : nullptr;
  float* top_logprobs = width > 0 ? args.top_logprobs.at(r).as<float>() : nullptr;
  if (valid && width > 0) listed = most_likely(s, vocab, width, plain);
  for (int64_t n = 0; n < listed; ++n) {
    top_ids[n] = s.candidates[n].id;
    top_logprobs[n] = logprob(s.candidates[n].logit);
  }

  float max = raw.max;
  if (valid && params.changes_logits()) {
    bias_and_penalise(params, s, vocab);
    const RowBounds changed = sample::bound_row(s.row, chunks, s.maxima);
    max = changed.max;
    valid = !changed.has_nan && max > -kInfinity;
  }
  if (!valid) listed = 0;
  for (int64_t n = listed; n < width; ++n) top_ids[n] = -1, top_logprobs[n] = -kInfinity;
  const int32_t id = !valid                           ? 0
                     : params.params.temperature == 0 ? argmax(s, vocab, max)
                                                      : draw(params, s, vocab, max);
  args.ids.as<int32_t>()[r] = id;
  args.valid.as<uint8_t>()[r] = valid;
  if (valid) count_drawn(args, r, id);
  if (args.logprobs.present()) {
    args.logprobs.as<float>()[r] = valid ? logprob(load(source.dtype, source.data, id)) : -kInfinity;
  }
}

}  // namespace

int64_t sampler_cpu_workspace_bytes(const SamplerArgs& args, const Stream& stream) {
  return Scratch::bytes(args.logits.shape[1]) * cpu::threads_of(stream.threads) + kWorkspaceSlack;
}

Status sampler_cpu(const SamplerArgs& args, const Stream& stream) {
  const int64_t vocab = args.logits.shape[1], bytes = Scratch::bytes(vocab);
  uint8_t* const memory = first_line(args.workspace);
  cpu::parallel_for(stream.threads, args.logits.shape[0], [&](int64_t r, int worker) {
    sample_row(args, r, Scratch(memory + worker * bytes, vocab));
  });
  return {};
}

}  // namespace vivace
