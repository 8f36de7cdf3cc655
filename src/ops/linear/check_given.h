#pragma once

#include <string_view>

#include "src/core/checks.h"
#include "src/core/error.h"

namespace vivace {

/// The first failure of `check`, or invalid_argument unless the tensor is there exactly when `wanted`; `needs`
/// completes "NAME is absent, needs ..." or "NAME is f32[4], needs ...".
inline Status check_given(const Checker& check, std::string_view op, std::string_view name,
                          const Tensor& tensor, bool wanted, std::string_view needs) {
  if (!check.ok() || tensor.present() == wanted) return check.status();
  return invalid_argument("{}: {} is {}, needs {}", op, name, to_string(tensor), needs);
}

}  // namespace vivace
