#pragma once

#include "src/core/dispatch.h"
#include "src/core/workspace.h"

namespace vivace {

/// dispatch() of an operator with a workspace: the row is chosen once, and the call is refused unless `args.workspace` has the scratch that
/// this row asks for.
template <class Args>
Status dispatch_in_workspace(const Operator<Args>& op, const Args& args, const Stream& stream) {
  const Row<Args>* row = choose(op, args, stream);
  if (row == nullptr) return internal::refuse(op, args, stream);
  if (row->workspace_bytes != nullptr) {
    VIVACE_TRY(check_workspace(op.name, args.workspace, row->workspace_bytes(args, stream), stream));
  }
  if (stream.check_only) return {};
  return run_counted(op, *row, args, stream, [&] { return row->run(args, stream); });
}

}  // namespace vivace
