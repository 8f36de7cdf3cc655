#include "src/bench/metrics.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <numeric>

#include "src/core/error.h"

namespace vivace::bench {

namespace {

constexpr int kTimelineBins = 120;
constexpr double kMs = 1000;

/// The time at which a request stopped or started generating, and by how much the count changes.
struct Change {
  double time;
  int delta;
};

std::vector<BatchPoint> measure_by_batch(const std::vector<RequestRecord>& requests) {
  std::vector<Change> changes;
  struct Gap {
    double middle, length;
  };
  std::vector<Gap> gaps;
  for (const RequestRecord& r : requests) {
    if (r.chunk_s.size() < 2) continue;
    changes.push_back({r.chunk_s.front(), 1});
    changes.push_back({r.chunk_s.back(), -1});
    for (size_t i = 1; i < r.chunk_s.size(); ++i) {
      gaps.push_back({(r.chunk_s[i] + r.chunk_s[i - 1]) / 2, r.chunk_s[i] - r.chunk_s[i - 1]});
    }
  }
  std::sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.time < b.time; });
  std::sort(gaps.begin(), gaps.end(), [](const Gap& a, const Gap& b) { return a.middle < b.middle; });
  std::map<int64_t, std::vector<double>> lengths;
  size_t change = 0;
  int64_t generating = 0;
  for (const Gap& gap : gaps) {
    for (; change < changes.size() && changes[change].time <= gap.middle; ++change) {
      generating += changes[change].delta;
    }
    lengths[std::max<int64_t>(1, generating)].push_back(gap.length * kMs);
  }
  std::vector<BatchPoint> points;
  for (auto& [batch, values] : lengths) {
    std::sort(values.begin(), values.end());
    points.push_back({batch, static_cast<int64_t>(values.size()), percentile(values, 50),
                      percentile(values, 10), percentile(values, 90)});
  }
  return points;
}

/// Adds the part of [begin, end) that falls into each bin, as a share of the bin's width.
void spread(std::vector<TimelineBin>& bins, double TimelineBin::*field, double begin, double end) {
  if (bins.empty() || end <= begin) return;
  const double width = bins.front().width_s;
  const int64_t last = static_cast<int64_t>(bins.size()) - 1;
  const int64_t from = std::clamp<int64_t>(static_cast<int64_t>(begin / width), 0, last);
  const int64_t to = std::clamp<int64_t>(static_cast<int64_t>(end / width), 0, last);
  for (int64_t i = from; i <= to; ++i) {
    TimelineBin& bin = bins[static_cast<size_t>(i)];
    const double overlap = std::min(end, bin.start_s + width) - std::max(begin, bin.start_s);
    bin.*field += std::max(0.0, overlap) / width;
  }
}

std::vector<TimelineBin> measure_timeline(const LoadResult& result) {
  std::vector<TimelineBin> bins;
  double end = 0;
  for (const RequestRecord& r : result.requests) end = std::max(end, r.end_s);
  if (end <= 0) return bins;
  bins.resize(kTimelineBins);
  const double width = end / kTimelineBins;
  for (int i = 0; i < kTimelineBins; ++i) bins[i] = {i * width, width};
  std::vector<std::vector<double>> gaps(kTimelineBins);
  const auto bin_of = [&](double time) {
    return static_cast<size_t>(std::clamp<int64_t>(static_cast<int64_t>(time / width), 0, kTimelineBins - 1));
  };
  for (const RequestRecord& r : result.requests) {
    spread(bins, &TimelineBin::open, r.start_s, r.end_s);
    if (r.chunk_s.empty()) continue;
    spread(bins, &TimelineBin::generating, r.chunk_s.front(), r.chunk_s.back());
    for (size_t i = 0; i < r.chunk_s.size(); ++i) {
      const size_t bin = bin_of(r.chunk_s[i]);
      bins[bin].tokens_per_s += 1 / width;
      if (i > 0) gaps[bin].push_back((r.chunk_s[i] - r.chunk_s[i - 1]) * kMs);
    }
  }
  for (size_t i = 0; i < bins.size(); ++i) {
    std::sort(gaps[i].begin(), gaps[i].end());
    bins[i].itl_median_ms = percentile(gaps[i], 50);
    bins[i].itl_p90_ms = percentile(gaps[i], 90);
  }
  return bins;
}

}  // namespace

double percentile(const std::vector<double>& sorted, double q) {
  if (sorted.empty()) return NAN;
  const double position = q / 100 * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (position - static_cast<double>(below));
}

Distribution distribution_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  Distribution d;
  d.median = percentile(values, 50);
  d.p90 = percentile(values, 90);
  d.p99 = percentile(values, 99);
  d.p999 = percentile(values, 99.9);
  d.max = percentile(values, 100);
  d.mean = values.empty()
               ? NAN
               : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  d.values = std::move(values);
  return d;
}

Result<Slo> Slo::parse(std::string_view text) {
  Slo slo;
  for (size_t begin = 0, end = 0; end != std::string_view::npos; begin = end + 1) {
    end = text.find(',', begin);
    const std::string_view part = text.substr(begin, end == std::string_view::npos ? end : end - begin);
    const size_t equals = std::min(part.find('='), part.size());
    const std::string_view name = part.substr(0, equals);
    std::optional<double>* bound = name == "ttft"   ? &slo.ttft_ms
                                   : name == "tpot" ? &slo.tpot_ms
                                   : name == "e2e"  ? &slo.e2e_ms
                                                    : nullptr;
    if (bound == nullptr || equals == part.size()) {
      return invalid_argument("is '{}', needs bounds of ttft, tpot and e2e, such as ttft=500ms,tpot=50ms",
                              text);
    }
    if (bound->has_value()) return invalid_argument("is '{}': {} is given twice", text, name);
    std::string_view number = part.substr(equals + 1);
    const double unit = number.ends_with("ms") ? 1 : number.ends_with('s') ? kMs : 0;  // 0: none was given
    number.remove_suffix(unit == 1 ? 2 : unit == kMs ? 1 : 0);
    double value = 0;
    const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    const bool whole = error == std::errc() && stop == number.data() + number.size();
    if (!whole || unit == 0 || !std::isfinite(value) || value <= 0) {
      return invalid_argument("is '{}': {} is '{}', needs a time above 0 in ms or s, such as 50ms or 1.5s",
                              text, name, part.substr(equals + 1));
    }
    *bound = value * unit;
  }
  return slo;
}

std::string Slo::text() const {
  std::string out;
  const auto add = [&](const char* name, const std::optional<double>& bound) {
    if (bound) out += fmt::format("{}{}={:g}ms", out.empty() ? "" : ",", name, *bound);
  };
  add("ttft", ttft_ms);
  add("tpot", tpot_ms);
  add("e2e", e2e_ms);
  return out;
}

Metrics measure(const LoadResult& result, const Slo& slo) {
  Metrics m;
  m.requests = static_cast<int64_t>(result.requests.size());
  m.duration_s = result.duration_s;
  std::vector<double> ttft, tpot, itl, e2e;
  std::map<std::string, int64_t> kinds;
  for (const RequestRecord& r : result.requests) {
    if (!r.error.empty()) {
      ++m.failures;
      ++kinds[r.error_kind.empty() ? "other" : r.error_kind];
      continue;
    }
    m.short_outputs += r.completion_tokens < r.wanted_tokens;
    m.usage_missing += !r.usage_known;
    m.prompt_tokens += r.prompt_tokens;
    m.output_tokens += r.completion_tokens;
    m.cached_tokens += r.cached_tokens;
    if (r.chunk_s.empty()) continue;
    ttft.push_back((r.chunk_s.front() - r.start_s) * kMs);
    e2e.push_back((r.chunk_s.back() - r.start_s) * kMs);
    double per_token = 0;
    if (r.completion_tokens > 1) {
      per_token = (r.chunk_s.back() - r.chunk_s.front()) * kMs / static_cast<double>(r.completion_tokens - 1);
      tpot.push_back(per_token);
    }
    const auto within = [](double value, const std::optional<double>& bound) {
      return !bound || value <= *bound;
    };
    m.good += slo.given() && within(ttft.back(), slo.ttft_ms) && within(per_token, slo.tpot_ms) &&
              within(e2e.back(), slo.e2e_ms);
    for (size_t i = 1; i < r.chunk_s.size(); ++i) itl.push_back((r.chunk_s[i] - r.chunk_s[i - 1]) * kMs);
  }
  m.failures_by_kind.assign(kinds.begin(), kinds.end());
  if (m.duration_s > 0) {
    m.goodput_s = static_cast<double>(m.good) / m.duration_s;
    m.throughput_tok_s = static_cast<double>(m.output_tokens) / m.duration_s;
    m.total_tok_s = static_cast<double>(m.output_tokens + m.prompt_tokens) / m.duration_s;
    m.request_s = static_cast<double>(m.requests - m.failures) / m.duration_s;
    m.mean_concurrency = std::accumulate(e2e.begin(), e2e.end(), 0.0) / kMs / m.duration_s;
  }
  m.ttft_ms = distribution_of(std::move(ttft));
  m.tpot_ms = distribution_of(std::move(tpot));
  m.itl_ms = distribution_of(std::move(itl));
  m.e2e_ms = distribution_of(std::move(e2e));
  m.by_batch = measure_by_batch(result.requests);
  m.timeline = measure_timeline(result);
  return m;
}

}  // namespace vivace::bench
