#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace vivace::engine {

/// What the planner knows of one request. `known` tokens have ids (prompt and output so far) or will have one
/// when the step in flight is over, the first `computed` of them have keys and values. A step computes the
/// next ones; the step that computes the last known token draws a new one.
struct Sequence {
  uint64_t id = 0;
  int64_t known = 0;
  int64_t computed =
      0;  ///< < known, or equal: it only waits for its last token. Waiting: tokens of the prefix cache it
          ///< would start with
  int64_t pages = 0;     ///< it holds. Waiting: cached pages it would take
  int64_t sole_pages =
      0;  ///< running: pages nobody else holds. Waiting: of `pages`, those nobody holds (idle)

  bool operator==(const Sequence&) const = default;
};

struct Limits {
  int64_t max_batch = 1;     ///< requests that run at once
  int64_t token_budget = 1;  ///< tokens per step; at least max_batch
  int64_t page_tokens = 1;
  int64_t pages = 1;  ///< the whole pool
};

/// The tokens [start, start + tokens) of one request.
struct Work {
  uint64_t id = 0;
  int64_t start = 0;
  int64_t tokens = 0;
  int64_t new_pages = 0;  ///< to allocate before the step
  bool admitted = false;  ///< it leaves the waiting queue with this step
  bool samples = false;   ///< its last known token is among them

  bool operator==(const Work&) const = default;
};

/// One step. Execute in this order: release the pages of `preempted`, take the cached pages of the admitted,
/// allocate new pages, run.
struct StepPlan {
  std::vector<uint64_t> preempted;  ///< youngest first; they go back to the front of the waiting queue
  std::vector<Work> work;           ///< the first `decodes` have one token each and draw; then prompt chunks
  int64_t decodes = 0;

  int64_t tokens() const;
  bool operator==(const StepPlan&) const = default;
};

/// "preempt 9 8 | 1@20+1 2@32+1 new 1 | 3@0+16 of 40 ..." - the same text for the same plan.
std::string to_string(const StepPlan& plan);

int64_t pages_for(int64_t tokens, int64_t page_tokens);

/// Decides one step. Pure: same queues and limits give the same plan; touches no device, no clock, no lock.
///
/// Both queues are oldest first, and everything that runs is older than everything that waits. Every running
/// sequence with one token to compute gets it; what is left of the token budget goes to unfinished prompts,
/// oldest first, in chunks, then to waiting ones. A sequence is admitted when the pages of all its known
/// tokens are there and one more for each running sequence; nobody overtakes the oldest waiting.
///
/// When a page is missing the youngest running sequence is preempted (it will be recomputed), and a step that
/// preempts admits nobody. The oldest is never preempted: alone it fits, since no request may need more than
/// `limits.pages`. So the oldest advances with every step, and no two preempt each other for ever.
///
/// `free_pages` may be allocated (idle cached pages included). `waiting` may be cut to the few that could be
/// admitted. The plan has no work when those that run only wait for their last tokens and nobody can be admitted.
StepPlan plan_step(std::span<const Sequence> running, std::span<const Sequence> waiting, int64_t free_pages,
                   const Limits& limits);

}  // namespace vivace::engine
