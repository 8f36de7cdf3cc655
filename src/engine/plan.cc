#include "src/engine/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace vivace::engine {

namespace {

int64_t missing_pages(const Sequence& sequence, const Limits& limits) {
  return std::max<int64_t>(0, pages_for(sequence.known, limits.page_tokens) - sequence.pages);
}

Work next_tokens(const Sequence& sequence, int64_t at_most, const Limits& limits) {
  const int64_t left = sequence.known - sequence.computed;
  const int64_t tokens = std::min(left, at_most);
  return {.id = sequence.id,
          .start = sequence.computed,
          .tokens = tokens,
          .new_pages = missing_pages(sequence, limits),
          .samples = tokens == left};
}

}  // namespace

int64_t pages_for(int64_t tokens, int64_t page_tokens) {
  return (tokens + page_tokens - 1) / page_tokens;
}

int64_t StepPlan::tokens() const {
  int64_t sum = 0;
  for (const Work& item : work) sum += item.tokens;
  return sum;
}

std::string to_string(const StepPlan& plan) {
  std::string text;
  auto out = std::back_inserter(text);
  if (!plan.preempted.empty()) fmt::format_to(out, "preempt");
  for (const uint64_t id : plan.preempted) fmt::format_to(out, " {}", id);
  for (size_t i = 0; i < plan.work.size(); ++i) {
    const Work& item = plan.work[i];
    if (!text.empty()) text += ' ';
    if (static_cast<int64_t>(i) == plan.decodes) text += "| ";
    fmt::format_to(out, "{}{}@{}+{}", item.admitted ? "admit " : "", item.id, item.start, item.tokens);
    if (item.new_pages > 0) fmt::format_to(out, " new {}", item.new_pages);
    if (item.samples && static_cast<int64_t>(i) >= plan.decodes) text += " draw";
  }
  return text;
}

StepPlan plan_step(std::span<const Sequence> running, std::span<const Sequence> waiting, int64_t free_pages,
                   const Limits& limits) {
  StepPlan plan;

  int64_t needed = 0;
  for (const Sequence& sequence : running) needed += missing_pages(sequence, limits);
  while (needed > free_pages && running.size() > 1) {
    const Sequence& youngest = running.back();
    plan.preempted.push_back(youngest.id);
    needed -= missing_pages(youngest, limits);
    free_pages += youngest.sole_pages;
    running = running.first(running.size() - 1);
    // Pages that the preempted shared with one another are sole_pages of none of them. Whoever runs alone has
    // all pages but its own.
    if (running.size() == 1) free_pages = limits.pages - running.front().pages;
  }
  if (needed > free_pages) return plan;  // larger than the pool: the caller's error
  free_pages -= needed;

  int64_t budget = limits.token_budget;
  for (const Sequence& sequence : running) {
    if (sequence.known - sequence.computed != 1 || budget == 0) continue;
    plan.work.push_back(next_tokens(sequence, 1, limits));
    --budget;
  }
  plan.decodes = static_cast<int64_t>(plan.work.size());
  for (const Sequence& sequence : running) {
    if (sequence.known - sequence.computed < 2 || budget == 0) continue;
    plan.work.push_back(next_tokens(sequence, budget, limits));
    budget -= plan.work.back().tokens;
  }
  if (!plan.preempted.empty()) return plan;

  int64_t batch = static_cast<int64_t>(running.size());
  for (const Sequence& sequence : waiting) {
    if (budget == 0 || batch == limits.max_batch) break;
    const int64_t taken = missing_pages(sequence, limits) + sequence.sole_pages;
    // A page in hand for each that runs: whoever is admitted into the last pages is preempted soon after.
    if (taken + batch > free_pages) break;
    plan.work.push_back(next_tokens(sequence, budget, limits));
    plan.work.back().admitted = true;
    budget -= plan.work.back().tokens;
    free_pages -= taken;
    ++batch;
  }
  return plan;
}

}  // namespace vivace::engine
