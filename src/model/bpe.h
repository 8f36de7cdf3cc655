#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace vivace::model {

/// The merge rules of a byte-level BPE over token ids. Immutable; any thread may use it.
class Bpe {
 public:
  struct Merge {
    int32_t left, right, merged;
  };
  /// Reused memory of encode(); one per thread.
  struct Scratch {
    struct Symbol {
      int32_t id;               // -1: merged into its left neighbour
      uint32_t previous, next;  // indices into `symbols`, kNone at the ends
    };
    std::vector<Symbol> symbols;
    std::vector<uint64_t> queue;  // a min-heap of (rank << 32 | index of the left symbol)
  };

  /// `byte_ids[b]` is the token of the single byte b, or -1. Rules come first to last: an earlier one wins, a
  /// pair that is listed twice has its last rank, one whose `merged` is -1 is skipped. `unknown_id` (or -1)
  /// stands for bytes without a token.
  Bpe(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges, int32_t unknown_id);

  /// Appends the ids of one word (below 4 GiB). O(n log n): again and again the rule of lowest rank is
  /// applied, leftmost first.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  struct Rule {
    uint64_t pair;
    uint32_t rank;
    int32_t merged;
  };
  const Rule* find(int32_t left, int32_t right) const;
  size_t slot_of(uint64_t pair) const;

  std::array<int32_t, 256> byte_ids_;
  int32_t unknown_id_;
  std::vector<Rule> rules_;  // open addressing; a power of two, at most half full
};

}  // namespace vivace::model
