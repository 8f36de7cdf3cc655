#include "src/core/dispatch.h"

#include <bit>
#include <cstdlib>
#include <utility>

namespace vivace {

namespace {

std::string dtype_list(int64_t mask) {
  std::string text;
  for (int i = 0; i < 63; ++i) {
    if ((mask >> i & 1) == 0) continue;
    if (!text.empty()) text += " or ";
    text += name_of(static_cast<DType>(i));
  }
  return text;
}

}  // namespace

int64_t alignment_of(const Tensor& tensor) {
  constexpr uint64_t kMost = 256;
  uint64_t bits = kMost | reinterpret_cast<uintptr_t>(tensor.data);
  const int64_t element = info_of(tensor.dtype).block_bytes;
  for (int axis = 0; axis + 1 < tensor.rank; ++axis) {
    if (tensor.shape[axis] > 1) bits |= static_cast<uint64_t>(tensor.stride[axis] * element);
  }
  return static_cast<int64_t>(bits & -bits);
}

std::string describe(const Need& need, const int64_t* got) {
  std::string text;
  switch (need.kind) {
    case Need::equals:
      text = fmt::format("needs {} = {}", need.fact, need.value);
      break;
    case Need::multiple_of:
      text = fmt::format("needs {} a multiple of {}", need.fact, need.value);
      break;
    case Need::at_most:
      text = fmt::format("needs {} <= {}", need.fact, need.value);
      break;
    case Need::at_least:
      text = fmt::format("needs {} >= {}", need.fact, need.value);
      break;
    case Need::power_of_two:
      text = fmt::format("needs {} a power of two", need.fact);
      break;
    case Need::dtype_in:
      text = fmt::format("needs {} of type {}", need.fact, dtype_list(need.value));
      break;
  }
  if (got == nullptr) return text;
  if (need.kind == Need::dtype_in) return text + fmt::format(", got {}", name_of(static_cast<DType>(*got)));
  return text + fmt::format(", got {}", *got);
}

bool satisfied(const Need& need, const Facts& facts) {
  const int64_t* got = facts.find(need.fact);
  if (got == nullptr) return false;
  switch (need.kind) {
    case Need::equals:
      return *got == need.value;
    case Need::multiple_of:
      return *got % need.value == 0;
    case Need::at_most:
      return *got <= need.value;
    case Need::at_least:
      return *got >= need.value;
    case Need::power_of_two:
      return *got > 0 && std::has_single_bit(static_cast<uint64_t>(*got));
    case Need::dtype_in:
      return *got >= 0 && *got < 63 && (need.value >> *got & 1) != 0;
  }
  return false;
}

namespace internal {

bool names_row(std::string_view prefix, std::string_view row) {
  return row.starts_with(prefix) && (row.size() == prefix.size() || row[prefix.size()] == '.');
}

Status no_row_fits(std::string_view op, std::string_view preferred, const std::vector<Refusal>& refused) {
  std::string text = preferred.empty()
                         ? fmt::format("{}: no implementation fits this call", op)
                         : fmt::format("{}: the preferred row '{}' does not fit this call", op, preferred);
  const char* separator = ": ";
  for (const Refusal& refusal : refused) {
    text += fmt::format("{}{}: {}", std::exchange(separator, "; "), refusal.row, refusal.reason);
  }
  return Status(Code::unsupported, std::move(text));
}

std::string refusal(std::span<const Need> needs, Device row_device, Device call_device, const Facts& facts) {
  if (row_device != call_device) {
    return fmt::format("runs on {}, the call is on {}", name_of(row_device), name_of(call_device));
  }
  for (const Need& need : needs) {
    if (!satisfied(need, facts)) return describe(need, facts.find(need.fact));
  }
  return "fits";
}

}  // namespace internal

}  // namespace vivace
