#pragma once

#include <array>
#include <cassert>
#include <span>
#include <string>
#include <vector>

#include "src/core/error.h"
#include "vivace/cost.h"
#include "vivace/dispatch.h"
#include "vivace/status.h"
#include "vivace/stream.h"

// The dispatch table of an operator: rows in order of preference, what each needs, and the one function that
// chooses. A new implementation is a new row; nothing else changes.

namespace vivace {

/// What every address of a row begins with: the largest power of two, at most 256, that divides the tensor's address and
/// its strides in bytes. A null pointer, as in a query of shapes, counts as aligned.
int64_t alignment_of(const Tensor& tensor);

/// The facts of one call that needs speak about: a few names with numbers, built on the stack. `compute_capability` is
/// added to those that an operator gives.
class Facts {
 public:
  Facts& add(std::string_view name, int64_t value) {
    assert(size_ < kMax);
    facts_[size_++] = {name, value};
    return *this;
  }
  Facts& add(std::string_view name, DType dtype) { return add(name, static_cast<int64_t>(dtype)); }
  const int64_t* find(std::string_view name) const {
    for (int i = 0; i < size_; ++i)
      if (facts_[i].name == name) return &facts_[i].value;
    return nullptr;
  }

 private:
  static constexpr int kMax = 32;
  struct Fact {
    std::string_view name;
    int64_t value;
  };
  std::array<Fact, kMax> facts_;
  int size_ = 0;
};

/// True when the facts satisfy the need. A need about a fact that the operator does not give is a defect of
/// the table.
bool satisfied(const Need& need, const Facts& facts);

template <class Args>
struct Row {
  std::string_view name;
  Device device;
  std::span<const Need> needs;
  Status (*run)(const Args&, const Stream&);
  std::string_view summary;
  /// Bytes of scratch that `run` needs for a call of this shape; null means none.
  int64_t (*workspace_bytes)(const Args&, const Stream&) = nullptr;
};

/// An operator: its name, the facts and the cost of a call, its rows.
template <class Args>
struct Operator {
  std::string_view name;
  std::string_view summary;
  Facts (*facts)(const Args&);
  Cost (*cost)(const Args&);
  std::span<const Row<Args>> rows;
};

/// Position in operators() of the operator whose table begins at `rows`; -1 when it is not listed (a test's
/// own table, whatever its name).
int operator_index(const void* rows);

namespace internal {
/// Whether the preference `prefix` names `row`: equal, or equal up to a dot.
bool names_row(std::string_view prefix, std::string_view row);
Status no_row_fits(std::string_view op, std::string_view preferred, const std::vector<Refusal>& refused);
std::string refusal(std::span<const Need> needs, Device row_device, Device call_device, const Facts& facts);
}  // namespace internal

/// The first row that fits, among those that the stream's preference names or, without one, among all; null
/// when none does. Reasons go to `refused` if given.
template <class Args>
const Row<Args>* choose(const Operator<Args>& op, const Args& args, const Stream& stream,
                        std::vector<Refusal>* refused = nullptr) {
  Facts facts = op.facts(args);
  facts.add("compute_capability", stream.compute_capability);
  const std::string_view preferred =
      stream.dispatch ? stream.dispatch->preferred(op.name) : std::string_view{};
  for (const Row<Args>& row : op.rows) {
    if (!preferred.empty() && !internal::names_row(preferred, row.name)) continue;
    bool fits = row.device == stream.device;
    for (const Need& need : row.needs) fits = fits && satisfied(need, facts);
    if (fits) return &row;
    if (refused) {
      refused->emplace_back();
      refused->back().row = row.name;
      refused->back().reason = internal::refusal(row.needs, row.device, stream.device, facts);
    }
  }
  return nullptr;
}

namespace internal {
/// The error of a call that no row fits: each row with its reason.
template <class Args>
Status refuse(const Operator<Args>& op, const Args& args, const Stream& stream) {
  std::vector<Refusal> refused;
  choose(op, args, stream, &refused);
  return no_row_fits(op.name, stream.dispatch ? stream.dispatch->preferred(op.name) : "", refused);
}
}  // namespace internal

/// For measurements: sees the calls of a Dispatch one by one, in order; no call of an operator is inside another. While a
/// Dispatch is observed, a single thread makes its calls: nothing here locks, though any thread may count.
class OperatorObserver {
 public:
  virtual ~OperatorObserver() = default;
  /// Shows the calls of `dispatch` to `observer` from now on; null: to nobody. While no call runs.
  static void set(Dispatch& dispatch, OperatorObserver* observer) { dispatch.observer_ = observer; }
  /// Who sees the calls of `dispatch`; null: nobody.
  static OperatorObserver* of(const Dispatch& dispatch) { return dispatch.observer_; }

  /// Before a call that chose its row: on a CPU it runs next, on a GPU it is enqueued. `op` and `row` are positions in
  /// operators() and its rows. An error is the call's, which does not run then.
  virtual Status before(int op, int row, const Cost& cost, const Stream& stream) = 0;
  /// After one that did not fail.
  virtual Status after(const Stream& stream) = 0;
};

/// Counts a call that chose `row`, runs it by run() and shows it to who observes.
template <class Args, class Run>
Status run_counted(const Operator<Args>& op, const Row<Args>& row, const Args& args, const Stream& stream,
                   const Run& run) {
  const int op_index = stream.dispatch == nullptr ? -1 : operator_index(op.rows.data());
  if (op_index < 0) return run();
  const int row_index = static_cast<int>(&row - op.rows.data());
  stream.dispatch->count(op_index, row_index);
  OperatorObserver* observer = OperatorObserver::of(*stream.dispatch);
  if (observer == nullptr) return run();
  VIVACE_TRY(observer->before(op_index, row_index, op.cost(args), stream));
  VIVACE_TRY(run());
  return observer->after(stream);
}

/// Chooses a row, counts the call and runs it. unsupported: no row fits; the message lists each and why.
template <class Args>
Status dispatch(const Operator<Args>& op, const Args& args, const Stream& stream) {
  const Row<Args>* row = choose(op, args, stream);
  if (row == nullptr) return internal::refuse(op, args, stream);
  if (stream.check_only) return {};
  return run_counted(op, *row, args, stream, [&] { return row->run(args, stream); });
}

/// Scratch bytes of the row that would run this call.
template <class Args>
Result<int64_t> workspace_bytes(const Operator<Args>& op, const Args& args, const Stream& stream) {
  const Row<Args>* row = choose(op, args, stream);
  if (row == nullptr) return internal::refuse(op, args, stream);
  return row->workspace_bytes ? row->workspace_bytes(args, stream) : int64_t{0};
}

/// Which row would run and why those before it would not.
template <class Args>
Choice explain(const Operator<Args>& op, const Args& args, const Stream& stream) {
  Choice choice;
  if (const Row<Args>* row = choose(op, args, stream, &choice.refused)) choice.row = row->name;
  return choice;
}

/// The table without its functions, for listings.
template <class Args>
OpInfo info_of(const Operator<Args>& op) {
  OpInfo info{op.name, op.summary, {}};
  for (const Row<Args>& row : op.rows) {
    info.rows.push_back({row.name, row.device, {row.needs.begin(), row.needs.end()}, row.summary});
  }
  return info;
}

}  // namespace vivace
