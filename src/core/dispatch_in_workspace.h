#pragma once

#include "src/core/dispatch.h"
#include "src/core/workspace.h"

namespace vivace {

/// choose() of an operator with a workspace. Refused: no row fits, or `args.workspace` lacks the scratch that the row asks for.
template <class Args>
Status choose_in_workspace(const Operator<Args>& op, const Args& args, const Stream& stream,
                           const Row<Args>*& row) {
  row = choose(op, args, stream);
  if (row == nullptr) return internal::refuse(op, args, stream);
  if (row->workspace_bytes == nullptr) return {};
  return check_workspace(op.name, args.workspace, row->workspace_bytes(args, stream), stream);
}

/// dispatch() of such an operator: the row is chosen once.
template <class Args>
Status dispatch_in_workspace(const Operator<Args>& op, const Args& args, const Stream& stream) {
  const Row<Args>* row = nullptr;
  VIVACE_TRY(choose_in_workspace(op, args, stream, row));
  if (stream.check_only) return {};
  return run_counted(op, *row, args, stream, [&] { return row->run(args, stream); });
}

}  // namespace vivace
