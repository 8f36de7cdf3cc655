#pragma once

#include <cstdint>
#include <string_view>

#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

// How a row lays out the scratch that its caller gives: parts start on cache lines, whatever the address of the
// tensor. A query asks for kWorkspaceSlack bytes on top of its parts.

namespace vivace {

inline constexpr int64_t kCacheLine = 64;
inline constexpr int64_t kWorkspaceSlack = kCacheLine - 1;

/// invalid_argument unless `workspace` is a u8 tensor of at least `needed` bytes on the stream's device; any tensor will do for 0, and
/// for a question.
Status check_workspace(std::string_view op, const Tensor& workspace, int64_t needed, const Stream& stream);

/// `bytes` rounded up to whole cache lines.
inline int64_t whole_lines(int64_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

/// The first cache line of a workspace; null for an absent one.
inline uint8_t* first_line(const Tensor& workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace.data);
  return workspace.as<uint8_t>() +
         (whole_lines(static_cast<int64_t>(address)) - static_cast<int64_t>(address));
}

}  // namespace vivace
