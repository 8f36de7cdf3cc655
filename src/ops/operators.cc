// The list of all operators, in the order of the documentation, and what needs the list: preferences and
// counters.

#include <algorithm>
#include <array>
#include <tuple>

#include "src/core/dispatch.h"
#include "src/ops/attention_decode/table.h"
#include "src/ops/attention_prefill/table.h"
#include "src/ops/attention_prologue/table.h"
#include "src/ops/choose_experts/table.h"
#include "src/ops/decode_schedule/table.h"
#include "src/ops/embedding/table.h"
#include "src/ops/fused_moe/table.h"
#include "src/ops/grouped_gemm/table.h"
#include "src/ops/linear/table.h"
#include "src/ops/quantize_fp8/table.h"
#include "src/ops/rms_norm/table.h"
#include "src/ops/route_top_k/table.h"
#include "src/ops/router_gemm/table.h"
#include "src/ops/sampler/table.h"
#include "src/ops/silu_mul/table.h"

namespace vivace {

namespace {

constexpr auto kTables = std::tie(kRmsNorm, kLinear, kEmbedding, kAttentionPrologue, kAttentionPrefill,
                                  kAttentionDecode, kDecodeSchedule, kRouterGemm, kRouteTopK, kChooseExperts,
                                  kFusedMoe, kGroupedGemm, kSiluMul, kQuantizeFp8, kSampler);

}  // namespace

const std::vector<OpInfo>& operators() {
  static const std::vector<OpInfo> all =
      std::apply([](const auto&... table) { return std::vector<OpInfo>{info_of(table)...}; }, kTables);
  return all;
}

Dispatch::Dispatch() = default;

Status Dispatch::prefer(std::string_view text) {
  std::map<std::string, std::string, std::less<>> named;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
    const size_t equal = item.find('=');
    if (equal == std::string_view::npos || equal == 0 || equal + 1 == item.size()) {
      return invalid_argument("--prefer: '{}' is not OP=ROW, such as linear=cpu.f32", item);
    }
    const std::string_view name = item.substr(0, equal), row = item.substr(equal + 1);
    const OpInfo* op = nullptr;
    std::string known;
    for (const OpInfo& candidate : operators()) {
      if (candidate.name == name) op = &candidate;
      known += fmt::format("{}{}", known.empty() ? "" : ", ", candidate.name);
    }
    if (op == nullptr) return not_found("--prefer: there is no operator '{}'; there are {}", name, known);
    bool found = false;
    known.clear();
    for (const RowInfo& candidate : op->rows) {
      found = found || internal::names_row(row, candidate.name);
      known += fmt::format("{}{}", known.empty() ? "" : ", ", candidate.name);
    }
    if (!found) return not_found("--prefer: {} has no row '{}'; it has {}", name, row, known);
    const auto [first, is_first] = named.emplace(name, row);
    if (!is_first) {
      return invalid_argument("--prefer: {} is given twice, as '{}' and as '{}', needs one row or prefix",
                              name, first->second, row);
    }
  }
  for (const auto& [name, row] : named) preferences_.insert_or_assign(name, row);
  return {};
}

std::string_view Dispatch::preferred(std::string_view op) const {
  if (preferences_.empty()) return {};
  const auto found = preferences_.find(op);
  return found == preferences_.end() ? std::string_view{} : std::string_view(found->second);
}

std::vector<RowCount> Dispatch::counts() const {
  std::vector<RowCount> result;
  const std::vector<OpInfo>& ops = operators();
  for (size_t op = 0; op < ops.size(); ++op) {
    for (size_t row = 0; row < ops[op].rows.size(); ++row) {
      const int64_t calls = counts_[op][row].load(std::memory_order_relaxed);
      if (calls > 0) result.push_back({ops[op].name, ops[op].rows[row].name, calls});
    }
  }
  return result;
}

int operator_index(const void* rows) {
  static constexpr auto kFirstRows = std::apply(
      [](const auto&... table) { return std::array{static_cast<const void*>(table.rows.data())...}; },
      kTables);
  const auto found = std::find(kFirstRows.begin(), kFirstRows.end(), rows);
  return found == kFirstRows.end() ? -1 : static_cast<int>(found - kFirstRows.begin());
}

}  // namespace vivace
