#include "src/model/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>

namespace vivace::model {
namespace {

constexpr uint64_t kEmptyPair = ~uint64_t{0};  // no pair of ids: ids are not negative
constexpr uint32_t kNone = ~uint32_t{0};

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

Bpe::Bpe(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges, int32_t unknown_id)
    : byte_ids_(byte_ids), unknown_id_(unknown_id) {
  rules_.assign(std::bit_ceil(2 * merges.size() + 2), Rule{kEmptyPair, 0, -1});
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    if (merges[rank].merged < 0) continue;
    const uint64_t pair = pair_of(merges[rank].left, merges[rank].right);
    rules_[slot_of(pair)] = {pair, static_cast<uint32_t>(rank), merges[rank].merged};
  }
}

size_t Bpe::slot_of(uint64_t pair) const {
  const size_t mask = rules_.size() - 1;
  size_t slot = (pair * 0x9E3779B97F4A7C15u >> 32) & mask;
  while (rules_[slot].pair != kEmptyPair && rules_[slot].pair != pair) slot = (slot + 1) & mask;
  return slot;
}

const Bpe::Rule* Bpe::find(int32_t left, int32_t right) const {
  if (left < 0 || right < 0) return nullptr;
  const Rule& rule = rules_[slot_of(pair_of(left, right))];
  return rule.pair == kEmptyPair ? nullptr : &rule;
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
  auto& symbols = scratch.symbols;
  symbols.clear();
  for (unsigned char byte : word) {
    const int32_t id = byte_ids_[byte] >= 0 ? byte_ids_[byte] : unknown_id_;
    if (id < 0) continue;
    const uint32_t index = static_cast<uint32_t>(symbols.size());
    symbols.push_back({id, index == 0 ? kNone : index - 1, index + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = kNone;

  auto& queue = scratch.queue;
  queue.clear();
  auto candidate = [&](uint32_t left) -> const Rule* {
    const auto& symbol = symbols[left];
    return symbol.next == kNone ? nullptr : find(symbol.id, symbols[symbol.next].id);
  };
  auto key = [](const Rule& rule, uint32_t left) { return uint64_t{rule.rank} << 32 | left; };
  for (uint32_t i = 0; i < symbols.size(); ++i) {
    if (const Rule* rule = candidate(i)) queue.push_back(key(*rule, i));
  }
  std::make_heap(queue.begin(), queue.end(), std::greater<>());

  auto push = [&](uint32_t left) {
    if (const Rule* rule = candidate(left)) {
      queue.push_back(key(*rule, left));
      std::push_heap(queue.begin(), queue.end(), std::greater<>());
    }
  };
  while (!queue.empty()) {
    const uint64_t top = queue.front();
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    queue.pop_back();
    const uint32_t left = static_cast<uint32_t>(top);
    // The entry is stale when one of its two symbols has changed since; then the pair has another rank or
    // none.
    if (symbols[left].id < 0) continue;
    const Rule* rule = candidate(left);
    if (rule == nullptr || key(*rule, left) != top) continue;
    const uint32_t right = symbols[left].next;
    symbols[left].id = rule->merged;
    symbols[left].next = symbols[right].next;
    symbols[right].id = -1;
    if (symbols[left].next != kNone) symbols[symbols[left].next].previous = left;
    push(left);
    if (symbols[left].previous != kNone) push(symbols[left].previous);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace vivace::model
