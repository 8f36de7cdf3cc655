#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "vivace/status.h"

namespace vivace::engine {

/// The pages of one sequence, in order, and how far they are known to the prefix cache.
struct PageChain {
  std::vector<int32_t> pages;
  int64_t published = 0;  ///< pages that publish() has seen; all of them full
  uint64_t hash = 0;      ///< of the salt and all tokens of those pages
  uint64_t entry = 0;     ///< the cache entry that holds the last of them; 0: none yet
};

/// A cached prefix that was found but not taken yet.
struct PrefixHit {
  PageChain chain;
  int64_t idle_pages = 0;  ///< of them, held by nobody: taking them costs as many free pages
};

/// Accounts for the KV pages of one engine: who holds which page, and which pages keep the keys and values of
/// a prefix that may come again. Knows no contents, only numbers; one thread uses it. After an exception (std::bad_alloc)
/// the account still holds and release() works; the chain at hand must be released.
///
/// A page is free, held (by one or more chains) or idle: held by nobody, but in the prefix cache. Allocation
/// takes free pages first and then evicts idle ones, the least recently released first, the end of a prefix
/// before its beginning.
///
/// The cache maps the hash of (salt, all tokens up to the end of a page) to a page. A hit also compares the
/// page's own tokens and the identity of the entry before it (for the first page: the salt), so equal hashes
/// of different prefixes cost a miss and never a wrong page.
class KvPages {
 public:
  struct Options {
    int64_t pages = 0;
    int64_t page_tokens = 16;
    bool prefix_cache = true;
    int hash_bits = 64;  ///< fewer make collisions, for tests
  };
  explicit KvPages(const Options& options);

  int64_t pages() const { return static_cast<int64_t>(pages_.size()); }
  int64_t page_tokens() const { return options_.page_tokens; }
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  int64_t idle_pages() const { return idle_; }
  /// What grow() can give out.
  int64_t available() const { return free_pages() + idle_pages(); }
  /// Pages of the chain that no other chain holds.
  int64_t sole_pages(const PageChain& chain) const;

  /// The longest cached prefix of `tokens` in whole pages, at most `limit` tokens. Linear in its length.
  PrefixHit find(std::string_view salt, std::span<const int32_t> tokens, int64_t limit) const;
  /// Holds the pages of a hit. Nothing may have been allocated since find().
  PageChain take(const PrefixHit& hit);
  /// Allocates until the chain has `pages` pages. False, and nothing changed, when there are too few.
  bool grow(PageChain& chain, int64_t pages);
  /// Puts the full pages of `tokens`, the tokens whose keys and values are in the chain's pages, into the
  /// cache. Where a page with the same prefix is there already, the chain holds that one from now on and its own is
  /// free: what was computed twice, at once or again, takes memory once.
  void publish(PageChain& chain, std::string_view salt, std::span<const int32_t> tokens);
  /// Lets go of all pages; the chain is empty afterwards.
  void release(PageChain& chain);
  /// Forgets every cached prefix; pages that only the cache held are free afterwards. Allocates nothing.
  void clear_cache();

  /// Checks the account against those who should hold pages: free + held + idle = total, each page is held as
  /// often as `chains` name it, by one alone unless it has published it, cache and pages agree. internal: the first
  /// disagreement.
  Status audit(std::span<const PageChain* const> chains) const;

 private:
  struct Page {
    int32_t holders = 0;
    int32_t older = -1, newer = -1;  ///< neighbours among the idle pages
    uint64_t hash = 0;
    uint64_t entry = 0;   ///< unique over the life of the cache; 0: not in the cache
    uint64_t parent = 0;  ///< entry of the page before; 0: the first page
    std::string salt;     ///< of a first page
  };

  uint64_t hash_of(uint64_t before, std::span<const int32_t> tokens) const;
  uint64_t hash_of(std::string_view salt) const;
  /// The page that holds these tokens after entry `parent`, or -1.
  int32_t cached(uint64_t hash, uint64_t parent, std::string_view salt,
                 std::span<const int32_t> tokens) const;
  std::span<const int32_t> tokens_of(int32_t page) const;
  void forget(int32_t page);
  void link_newest(int32_t page);
  void unlink(int32_t page);

  Options options_;
  std::vector<Page> pages_;
  std::vector<int32_t> tokens_;  ///< [pages, page_tokens] of the cached ones
  std::vector<int32_t> free_;    ///< used as a stack
  std::unordered_map<uint64_t, int32_t> by_hash_;
  uint64_t next_entry_ = 1;
  int32_t oldest_ = -1, newest_ = -1;
  int64_t idle_ = 0;
};

}  // namespace vivace::engine
