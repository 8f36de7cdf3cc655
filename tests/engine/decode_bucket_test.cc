#include "src/engine/decode_bucket.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace vivace::engine {
namespace {

std::vector<int64_t> buckets(int64_t max_rows) {
  std::set<int64_t> all;
  for (int64_t rows = 1; rows <= max_rows; ++rows) all.insert(decode_bucket(rows, max_rows));
  return {all.begin(), all.end()};
}

TEST(DecodeBucket, FewGraphsServeAllNumbersOfRows) {
  EXPECT_EQ(buckets(1), (std::vector<int64_t>{1}));
  EXPECT_EQ(buckets(6), (std::vector<int64_t>{1, 2, 4, 6}));
  EXPECT_EQ(buckets(64), (std::vector<int64_t>{1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64}));
  EXPECT_EQ(buckets(200),
            (std::vector<int64_t>{1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 200}));
}

TEST(DecodeBucket, IsTheSmallestThatHoldsTheRows) {
  for (const int64_t max_rows : {1, 3, 8, 64, 100, 128, 250, 1024}) {
    const std::vector<int64_t> all = buckets(max_rows);
    for (int64_t rows = 1; rows <= max_rows; ++rows) {
      EXPECT_EQ(decode_bucket(rows, max_rows), *std::ranges::lower_bound(all, rows))
          << rows << " of " << max_rows;
    }
  }
}

TEST(DecodeBucket, PaddingIsLessThanHalfAndBeyond32RowsLessThanAFifth) {
  for (int64_t rows = 1; rows <= 4096; ++rows) {
    const int64_t bucket = decode_bucket(rows, 4096), padding = bucket - rows;
    EXPECT_LT(2 * padding, bucket) << rows;
    if (rows > 32) {
      EXPECT_LT(5 * padding, bucket) << rows;
    }
  }
}

}  // namespace
}  // namespace vivace::engine
