#include "src/engine/kv_pages.h"

#include <algorithm>
#include <utility>

#include "src/core/error.h"

namespace vivace::engine {

namespace {

/// A bijection of 64-bit words in which every input bit reaches every output bit.
uint64_t mix(uint64_t word) {
  word ^= word >> 32;
  word *= 0xe9846af9b1a615dULL;
  word ^= word >> 32;
  word *= 0xe9846af9b1a615dULL;
  word ^= word >> 28;
  return word;
}

}  // namespace

KvPages::KvPages(const Options& options) : options_(options) {
  pages_.resize(static_cast<size_t>(options.pages));
  if (options.prefix_cache) tokens_.resize(static_cast<size_t>(options.pages * options.page_tokens));
  free_.reserve(pages_.size());  // so that giving a page back never allocates
  for (int64_t page = options.pages; page-- > 0;) free_.push_back(static_cast<int32_t>(page));
}

uint64_t KvPages::hash_of(uint64_t before, std::span<const int32_t> tokens) const {
  for (const int32_t token : tokens)
    before = mix(before + 0x9e3779b97f4a7c15ULL + static_cast<uint32_t>(token));
  return options_.hash_bits >= 64 ? before : before & ((uint64_t{1} << options_.hash_bits) - 1);
}

uint64_t KvPages::hash_of(std::string_view salt) const {
  uint64_t hash = mix(salt.size());
  for (const char byte : salt) hash = mix(hash + 0x9e3779b97f4a7c15ULL + static_cast<unsigned char>(byte));
  return hash;
}

std::span<const int32_t> KvPages::tokens_of(int32_t page) const {
  return std::span(tokens_).subspan(static_cast<size_t>(page * options_.page_tokens),
                                    static_cast<size_t>(options_.page_tokens));
}

int32_t KvPages::cached(uint64_t hash, uint64_t parent, std::string_view salt,
                        std::span<const int32_t> tokens) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return -1;
  const Page& page = pages_[found->second];
  if (page.parent != parent || (parent == 0 && page.salt != salt)) return -1;
  return std::ranges::equal(tokens_of(found->second), tokens) ? found->second : -1;
}

int64_t KvPages::sole_pages(const PageChain& chain) const {
  return std::ranges::count_if(chain.pages, [&](int32_t page) { return pages_[page].holders == 1; });
}

PrefixHit KvPages::find(std::string_view salt, std::span<const int32_t> tokens, int64_t limit) const {
  PrefixHit hit;
  hit.chain.hash = hash_of(salt);
  if (!options_.prefix_cache) return hit;
  const int64_t whole = std::min<int64_t>(limit, static_cast<int64_t>(tokens.size())) / page_tokens();
  for (int64_t i = 0; i < whole; ++i) {
    const auto page_ids = tokens.subspan(static_cast<size_t>(i * page_tokens()), tokens_of(0).size());
    const uint64_t hash = hash_of(hit.chain.hash, page_ids);
    const int32_t page = cached(hash, hit.chain.entry, salt, page_ids);
    if (page < 0) break;
    hit.chain.pages.push_back(page);
    hit.chain.hash = hash;
    hit.chain.entry = pages_[page].entry;
    if (pages_[page].holders == 0) ++hit.idle_pages;
  }
  hit.chain.published = static_cast<int64_t>(hit.chain.pages.size());
  return hit;
}

PageChain KvPages::take(const PrefixHit& hit) {
  PageChain chain = hit.chain;
  for (const int32_t page : chain.pages)
    if (pages_[page].holders++ == 0) unlink(page);
  return chain;
}

bool KvPages::grow(PageChain& chain, int64_t pages) {
  const int64_t wanted = pages - static_cast<int64_t>(chain.pages.size());
  if (wanted > available()) return false;
  for (int64_t i = 0; i < wanted; ++i) {
    if (free_.empty()) {
      const int32_t evicted = oldest_;
      unlink(evicted);
      forget(evicted);
      free_.push_back(evicted);
    }
    chain.pages.push_back(free_.back());
    free_.pop_back();
    pages_[chain.pages.back()].holders = 1;
  }
  return true;
}

void KvPages::publish(PageChain& chain, std::string_view salt, std::span<const int32_t> tokens) {
  if (!options_.prefix_cache) return;
  if (chain.published == 0) chain.hash = hash_of(salt);
  const int64_t full = static_cast<int64_t>(tokens.size()) / page_tokens();
  for (; chain.published < full; ++chain.published) {
    const auto page_ids =
        tokens.subspan(static_cast<size_t>(chain.published * page_tokens()), tokens_of(0).size());
    chain.hash = hash_of(chain.hash, page_ids);
    int32_t& page = chain.pages[static_cast<size_t>(chain.published)];
    if (const int32_t twin = cached(chain.hash, chain.entry, salt, page_ids); twin >= 0) {
      if (pages_[twin].holders++ == 0) unlink(twin);
      pages_[page].holders = 0;  // the chain was its only one: others hold published pages only
      free_.push_back(std::exchange(page, twin));
    } else {
      // Another prefix with this hash, or one whose beginning was evicted: the newer one stays.
      if (const auto other = by_hash_.find(chain.hash); other != by_hash_.end()) {
        const int32_t loser = other->second;
        forget(loser);
        if (pages_[loser].holders == 0) {
          unlink(loser);
          free_.push_back(loser);
        }
      }
      Page& record = pages_[page];
      if (chain.entry == 0) record.salt = salt;
      by_hash_[chain.hash] = page;  // the last that may throw
      record.hash = chain.hash;
      record.entry = next_entry_++;
      record.parent = chain.entry;
      std::ranges::copy(page_ids, tokens_.begin() + page * page_tokens());
    }
    chain.entry = pages_[page].entry;
  }
}

void KvPages::release(PageChain& chain) {
  for (size_t i = chain.pages.size(); i-- > 0;) {  // the end of a prefix first, so that it is evicted first
    const int32_t page = chain.pages[i];
    if (--pages_[page].holders > 0) continue;
    if (pages_[page].entry != 0) {
      link_newest(page);
    } else {
      free_.push_back(page);
    }
  }
  chain = {};
}

void KvPages::clear_cache() {
  for (int32_t page = 0; page < pages(); ++page) {
    if (pages_[page].entry == 0) continue;
    forget(page);
    if (pages_[page].holders > 0) continue;
    unlink(page);
    free_.push_back(page);
  }
}

void KvPages::forget(int32_t page) {
  by_hash_.erase(pages_[page].hash);
  pages_[page].entry = 0;
  pages_[page].parent = 0;
  pages_[page].salt.clear();
}

void KvPages::link_newest(int32_t page) {
  pages_[page].older = newest_;
  pages_[page].newer = -1;
  (newest_ < 0 ? oldest_ : pages_[newest_].newer) = page;
  newest_ = page;
  ++idle_;
}

void KvPages::unlink(int32_t page) {
  Page& p = pages_[page];
  (p.older < 0 ? oldest_ : pages_[p.older].newer) = p.newer;
  (p.newer < 0 ? newest_ : pages_[p.newer].older) = p.older;
  p.older = p.newer = -1;
  --idle_;
}

Status KvPages::audit(std::span<const PageChain* const> chains) const {
  const auto wrong = [](const auto& format, auto... args) {
    return error(Code::internal, "kv_pages: {}", fmt::format(fmt::runtime(format), args...));
  };
  std::vector<int32_t> holders(pages_.size());
  for (const PageChain* chain : chains) {
    for (const int32_t page : chain->pages) {
      if (page < 0 || page >= pages()) return wrong("a chain holds page {} of {}", page, pages());
      ++holders[page];
    }
  }
  for (const PageChain* chain : chains)
    for (size_t i = static_cast<size_t>(chain->published); i < chain->pages.size(); ++i)
      if (const int32_t page = chain->pages[i]; holders[page] != 1)
        return wrong("page {} is not published by a chain that holds it, and {} hold it", page,
                     holders[page]);
  enum : uint8_t { unseen, free, idle };
  std::vector<uint8_t> seen(pages_.size(), unseen);
  for (const int32_t page : free_) {
    if (seen[page] != unseen) return wrong("page {} is free twice", page);
    seen[page] = free;
  }
  int64_t linked = 0;
  for (int32_t page = oldest_; page >= 0; page = pages_[page].newer, ++linked) {
    if (seen[page] != unseen) return wrong("page {} is idle and also free or idle twice", page);
    seen[page] = idle;
  }
  if (linked != idle_) return wrong("{} pages are idle, the count says {}", linked, idle_);
  size_t cached_pages = 0;
  for (int32_t page = 0; page < pages(); ++page) {
    const Page& p = pages_[page];
    if (p.holders != holders[page])
      return wrong("page {} counts {} holders, {} chains name it", page, p.holders, holders[page]);
    if ((p.holders > 0) != (seen[page] == unseen))
      return wrong("page {} has {} holders and is {}", page, p.holders,
                   seen[page] == unseen ? "lost"
                   : seen[page] == free ? "free"
                                        : "idle");
    if (seen[page] == idle && p.entry == 0) return wrong("page {} is idle but not in the cache", page);
    if (seen[page] == free && p.entry != 0) return wrong("page {} is free but in the cache", page);
    if (p.entry == 0) continue;
    ++cached_pages;
    const auto found = by_hash_.find(p.hash);
    if (found == by_hash_.end() || found->second != page)
      return wrong("page {} is not where its hash leads", page);
  }
  if (cached_pages != by_hash_.size())
    return wrong("the cache has {} entries for {} pages", by_hash_.size(), cached_pages);
  return {};
}

}  // namespace vivace::engine
