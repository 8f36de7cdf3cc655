#include "src/engine/kv_pages.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>

namespace vivace::engine {
namespace {

using Tokens = std::vector<int32_t>;

Tokens count_from(int32_t first, int64_t tokens) {
  Tokens ids(static_cast<size_t>(tokens));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

#define EXPECT_AUDIT(pages, ...)                                 \
  do {                                                           \
    const std::vector<const PageChain*> chains_ = {__VA_ARGS__}; \
    const Status status_ = (pages).audit(chains_);               \
    EXPECT_TRUE(status_.ok()) << status_.message();              \
  } while (0)

/// A chain with the keys and values of all `ids`, published.
PageChain fill(KvPages& pages, const std::string& salt, const Tokens& ids) {
  PageChain chain = pages.take(pages.find(salt, ids, static_cast<int64_t>(ids.size()) - 1));
  const int64_t wanted = (static_cast<int64_t>(ids.size()) + pages.page_tokens() - 1) / pages.page_tokens();
  EXPECT_TRUE(pages.grow(chain, wanted));
  pages.publish(chain, salt, ids);
  return chain;
}

int64_t hit_tokens(const KvPages& pages, const std::string& salt, const Tokens& ids) {
  const PrefixHit hit = pages.find(salt, ids, static_cast<int64_t>(ids.size()));
  return static_cast<int64_t>(hit.chain.pages.size()) * pages.page_tokens();
}

TEST(KvPages, GrowIsAllOrNothing) {
  KvPages pages({.pages = 4, .page_tokens = 16});
  PageChain a, b;
  EXPECT_TRUE(pages.grow(a, 3));
  EXPECT_FALSE(pages.grow(b, 2));
  EXPECT_TRUE(b.pages.empty());
  EXPECT_EQ(pages.free_pages(), 1);
  EXPECT_AUDIT(pages, &a, &b);
  pages.release(a);
  pages.release(a);  // an empty chain: nothing is freed twice
  EXPECT_EQ(pages.free_pages(), 4);
  EXPECT_AUDIT(pages, );
}

TEST(KvPages, PublishedPagesOutliveTheirChainAndAreShared) {
  KvPages pages({.pages = 8, .page_tokens = 4});
  const Tokens ids = count_from(0, 10);
  PageChain a = fill(pages, "", ids);
  const Tokens kept(a.pages.begin(), a.pages.begin() + 2);
  EXPECT_EQ(pages.find("", ids, 100).idle_pages, 0);
  PageChain b = pages.take(pages.find("", ids, 9));
  EXPECT_EQ(b.pages, kept);
  EXPECT_EQ(pages.sole_pages(a), 1);
  EXPECT_EQ(pages.sole_pages(b), 0);
  EXPECT_AUDIT(pages, &a, &b);
  pages.release(a);
  EXPECT_EQ(pages.idle_pages(), 0);
  pages.release(b);
  EXPECT_EQ(pages.idle_pages(), 2);
  EXPECT_EQ(pages.available(), 8);
  EXPECT_EQ(pages.find("", ids, 100).idle_pages, 2);
  EXPECT_AUDIT(pages, );
}

TEST(KvPages, SaltsAndOtherBeginningsDoNotShare) {
  KvPages pages({.pages = 16, .page_tokens = 4});
  PageChain a = fill(pages, "tenant", count_from(0, 8));
  EXPECT_EQ(hit_tokens(pages, "tenant", count_from(0, 8)), 8);
  EXPECT_EQ(hit_tokens(pages, "", count_from(0, 8)), 0);
  EXPECT_EQ(hit_tokens(pages, "tenant2", count_from(0, 8)), 0);
  Tokens other = count_from(0, 8);
  other[0] = 99;
  EXPECT_EQ(hit_tokens(pages, "tenant", other), 0) << "the second page alone is not a prefix";
  other = count_from(0, 8);
  other[7] = 99;
  EXPECT_EQ(hit_tokens(pages, "tenant", other), 4);
  pages.release(a);
}

// https://github.com/vllm-project/vllm/pull/17999 - a prompt that is cached entirely leaves nothing to compute.
TEST(KvPages, H37LimitLeavesATokenToCompute) {
  const std::map<int64_t, int64_t> cached = {{63, 0}, {64, 0}, {65, 64}, {128, 64}, {129, 128}};
  for (const auto& [length, want] : cached) {
    KvPages pages({.pages = 8, .page_tokens = 64});
    const Tokens ids = count_from(0, length);
    PageChain a = fill(pages, "", ids);
    pages.release(a);
    EXPECT_EQ(static_cast<int64_t>(pages.find("", ids, length - 1).chain.pages.size()) * 64, want) << length;
  }
}

TEST(KvPages, EvictsTheLeastRecentlyReleasedAndEndsBeforeBeginnings) {
  KvPages pages({.pages = 6, .page_tokens = 4});
  PageChain a = fill(pages, "", count_from(0, 12)), b = fill(pages, "", count_from(100, 12));
  pages.release(a);
  pages.release(b);
  PageChain c;
  EXPECT_TRUE(pages.grow(c, 1));
  EXPECT_EQ(hit_tokens(pages, "", count_from(0, 12)), 8);
  EXPECT_EQ(hit_tokens(pages, "", count_from(100, 12)), 12);
  PageChain again = pages.take(pages.find("", count_from(0, 12), 12));  // used: now b is the older one
  pages.release(again);
  EXPECT_TRUE(pages.grow(c, 3));
  EXPECT_EQ(hit_tokens(pages, "", count_from(0, 12)), 8);
  EXPECT_EQ(hit_tokens(pages, "", count_from(100, 12)), 4);
  EXPECT_AUDIT(pages, &c);
}

TEST(KvPages, ACopyOfACachedPageIsGivenUpForIt) {
  KvPages pages({.pages = 8, .page_tokens = 4});
  PageChain a, b;  // both computed at the same time
  ASSERT_TRUE(pages.grow(a, 3) && pages.grow(b, 3));
  const int32_t last_of_b = b.pages[2];
  pages.publish(a, "", count_from(0, 8));
  pages.publish(b, "", count_from(0, 8));
  EXPECT_EQ(pages.free_pages(), 4);
  EXPECT_EQ(b.pages, (Tokens{a.pages[0], a.pages[1], last_of_b}))
      << "a page that is not full is its chain's own";
  EXPECT_EQ(pages.sole_pages(b), 1);
  EXPECT_AUDIT(pages, &a, &b);
  pages.release(a);
  EXPECT_EQ(pages.idle_pages(), 0);
  pages.release(b);
  EXPECT_EQ(pages.idle_pages(), 2);
  EXPECT_EQ(pages.free_pages(), 6);
  EXPECT_AUDIT(pages, );
}

TEST(KvPages, WhatIsComputedAgainTakesPagesUsedBefore) {
  KvPages pages({.pages = 64, .page_tokens = 4});
  const Tokens ids = count_from(0, 40);
  for (int round = 0; round < 3; ++round) {
    PageChain chain =
        pages.take(pages.find("", ids, 3));  // a prompt too short for a hit, then a token at a time
    for (int64_t tokens = 1; tokens <= 40; ++tokens) {
      ASSERT_TRUE(pages.grow(chain, (tokens + 3) / 4));
      for (const int32_t page : chain.pages) EXPECT_LE(page, 10) << "one more than the first round had";
      pages.publish(chain, "", std::span(ids).first(static_cast<size_t>(tokens)));
      EXPECT_AUDIT(pages, &chain);
    }
    pages.release(chain);
    EXPECT_EQ(pages.idle_pages(), 10);
  }
}

TEST(KvPages, WithoutPrefixCacheNothingIsKept) {
  KvPages pages({.pages = 8, .page_tokens = 4, .prefix_cache = false});
  PageChain a = fill(pages, "", count_from(0, 8));
  EXPECT_EQ(hit_tokens(pages, "", count_from(0, 8)), 0);
  pages.release(a);
  EXPECT_EQ(pages.free_pages(), 8);
}

TEST(KvPages, AuditNoticesALostHolder) {
  KvPages pages({.pages = 8, .page_tokens = 4});
  PageChain a = fill(pages, "", count_from(0, 8));
  EXPECT_EQ(pages.audit({}).code(), Code::internal);
  const std::vector<const PageChain*> twice = {&a, &a};
  EXPECT_EQ(pages.audit(twice).code(), Code::internal);
  PageChain stranger{.pages = {8}};
  const std::vector<const PageChain*> outside = {&a, &stranger};
  EXPECT_NE(pages.audit(outside).message().find("page 8 of 8"), std::string::npos);
  EXPECT_AUDIT(pages, &a);
  PageChain b = pages.take(pages.find("", count_from(0, 9), 8));
  EXPECT_AUDIT(pages, &a, &b);
  b.published = 1;  // the other page would be freed under the first chain if this one published it again
  const std::vector<const PageChain*> both = {&a, &b};
  EXPECT_NE(pages.audit(both).message().find("is not published"), std::string::npos);
}

/// Random traffic over few tokens, so that prefixes repeat. `contents` plays the KV memory: what each page
/// was last filled with, which a hit must find unchanged.
void traffic(uint64_t seed, int hash_bits, int64_t& hits) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  const int64_t page_tokens = int64_t{1} << below(4);
  KvPages pages({.pages = 1 + below(40), .page_tokens = page_tokens, .hash_bits = hash_bits});
  std::vector<std::pair<std::string, Tokens>> contents(static_cast<size_t>(pages.pages()));
  struct Holder {
    PageChain chain;
    std::string salt;
    Tokens ids;

    /// What page `i` of the chain is for.
    std::pair<std::string, Tokens> content(size_t i, int64_t page_tokens) const {
      const auto end = std::min(std::ssize(ids), static_cast<int64_t>(i + 1) * page_tokens);
      return {salt, Tokens(ids.begin(), ids.begin() + end)};
    }
  };
  std::vector<std::unique_ptr<Holder>> holders;
  const auto publish = [&](Holder& h, int64_t tokens) {
    pages.publish(h.chain, h.salt, std::span(h.ids).first(static_cast<size_t>(tokens)));
    for (size_t i = 0; i < h.chain.pages.size(); ++i)
      ASSERT_EQ(contents[static_cast<size_t>(h.chain.pages[i])], h.content(i, page_tokens))
          << "another page was taken for its own";
  };
  for (int step = 0; step < 2000; ++step) {
    const int64_t action = below(200);
    if (action < 80) {
      auto h = std::make_unique<Holder>();
      h->salt = below(3) == 0 ? "x" : "";
      h->ids.resize(static_cast<size_t>(1 + below(static_cast<uint64_t>(6 * page_tokens))));
      for (int32_t& id : h->ids) id = static_cast<int32_t>(below(20) == 0);
      const PrefixHit hit = pages.find(h->salt, h->ids, static_cast<int64_t>(h->ids.size()) - 1);
      const int64_t before = pages.available();
      h->chain = pages.take(hit);
      ASSERT_EQ(pages.available(), before - hit.idle_pages);
      const size_t cached = h->chain.pages.size();
      hits += static_cast<int64_t>(cached);
      for (size_t i = 0; i < cached; ++i)
        ASSERT_EQ(contents[static_cast<size_t>(h->chain.pages[i])], h->content(i, page_tokens))
            << "wrong prefix";
      if (pages.grow(h->chain, (std::ssize(h->ids) + page_tokens - 1) / page_tokens)) {
        for (size_t i = cached; i < h->chain.pages.size(); ++i)
          contents[static_cast<size_t>(h->chain.pages[i])] = h->content(i, page_tokens);
        if (below(4) != 0) publish(*h, below(2) == 0 ? std::ssize(h->ids) : below(h->ids.size()));
      }
      holders.push_back(std::move(h));
    } else if (action == 80) {
      pages.clear_cache();
      for (const auto& h : holders) ASSERT_EQ(hit_tokens(pages, h->salt, h->ids), 0) << "what was forgotten";
    } else if (!holders.empty()) {
      const auto chosen = holders.begin() + below(holders.size());
      Holder& h = **chosen;
      if (action < 120 && std::ssize(h.chain.pages) * page_tokens >= std::ssize(h.ids)) {
        publish(h, below(h.ids.size() + 1));  // later, and in parts, as sequences do
      } else if (action >= 120) {
        pages.release(h.chain);
        holders.erase(chosen);
      }
    }
    if (testing::Test::HasFatalFailure()) return;
    std::vector<const PageChain*> chains;
    for (const auto& h : holders) chains.push_back(&h->chain);
    const Status audit = pages.audit(chains);
    ASSERT_TRUE(audit.ok()) << audit.message() << " after step " << step;
  }
  for (const auto& h : holders) pages.release(h->chain);
  EXPECT_EQ(pages.available(), pages.pages());
}

TEST(KvPages, RandomTrafficAuditsAndFindsOnlyRightPrefixes) {
  int64_t hits = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    traffic(seed, 64, hits);
    if (HasFailure()) return;
  }
  EXPECT_GT(hits, 1000);
}

TEST(KvPages, EqualHashesNeverServeAWrongPrefix) {
  int64_t hits = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    traffic(seed, static_cast<int>(seed % 5), hits);
    if (HasFailure()) return;
  }
  EXPECT_GT(hits, 100);
}

}  // namespace
}  // namespace vivace::engine
