#include "src/core/workspace.h"

#include "src/core/checks.h"
#include "src/core/error.h"
#include "vivace/dispatch.h"

namespace vivace {

Status check_workspace(std::string_view op, const Tensor& workspace, int64_t needed, const Stream& stream) {
  if (needed <= 0 || stream.check_only) return {};
  Checker check(op, stream);
  check.tensor("workspace", workspace, {"workspace_bytes"})
      .dtype("workspace", workspace, dtypes_mask(DType::u8));
  VIVACE_TRY(check.status());
  if (workspace.shape[0] >= needed) return {};
  return invalid_argument("{}: workspace.shape[0] is {}, needs at least {} bytes", op, workspace.shape[0],
                          needed);
}

}  // namespace vivace
