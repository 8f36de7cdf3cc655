#include "src/core/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace vivace {
namespace {

/// A view of `memory` with these strides in elements.
Tensor view(void* memory, DType dtype, std::initializer_list<int64_t> shape,
            std::initializer_list<int64_t> stride) {
  Tensor tensor(memory, dtype, shape);
  std::copy(stride.begin(), stride.end(), tensor.stride.begin());
  return tensor;
}

std::vector<bool> bytes_of(const Tensor& t, const uint8_t* memory, size_t size) {
  std::vector<bool> used(size);
  const int64_t width = info_of(t.dtype).block_bytes;
  std::vector<int64_t> index(static_cast<size_t>(t.rank));
  for (int64_t n = t.elements(); n > 0; --n) {
    int64_t offset = static_cast<uint8_t*>(t.data) - memory;
    for (int i = 0; i < t.rank; ++i)
      offset += index[static_cast<size_t>(i)] * t.stride[static_cast<size_t>(i)] * width;
    for (int64_t byte = 0; byte < width; ++byte) used[static_cast<size_t>(offset + byte)] = true;
    for (int i = t.rank - 1; i >= 0 && ++index[static_cast<size_t>(i)] == t.shape[static_cast<size_t>(i)];
         --i) {
      index[static_cast<size_t>(i)] = 0;
    }
  }
  return used;
}

TEST(Overlap, OfDenseTensors) {
  std::vector<float> memory(64);
  const Tensor a(memory.data(), DType::f32, {4, 8});
  EXPECT_TRUE(overlap(a, a));
  EXPECT_TRUE(overlap(a, Tensor(memory.data() + 31, DType::f32, {1})));
  EXPECT_FALSE(overlap(a, Tensor(memory.data() + 32, DType::f32, {32})));
  EXPECT_TRUE(overlap(a, Tensor(memory.data() + 16, DType::bf16, {4, 4})));
  EXPECT_FALSE(overlap(a, Tensor(memory.data(), DType::f32, {0, 8})));
  EXPECT_FALSE(overlap(a, Tensor(nullptr, DType::f32, {4, 8})));
  EXPECT_FALSE(overlap(a, Tensor()));
}

TEST(Overlap, KeysAndValuesSideBySideShareNothing) {
  std::vector<uint16_t> memory(6 * 16 * 2 * 2 * 64);
  // [blocks, heads, tokens, 2 * dim], seen as [blocks, tokens, heads, dim].
  const Tensor k = view(memory.data(), DType::bf16, {6, 16, 2, 64}, {16 * 2 * 128, 128, 16 * 128, 1});
  const Tensor v = view(memory.data() + 64, DType::bf16, {6, 16, 2, 64}, {16 * 2 * 128, 128, 16 * 128, 1});
  EXPECT_FALSE(overlap(k, v));
  EXPECT_TRUE(
      overlap(k, view(memory.data() + 63, DType::bf16, {6, 16, 2, 64}, {16 * 2 * 128, 128, 16 * 128, 1})));
  EXPECT_TRUE(overlap(k, Tensor(memory.data() + 3 * 128, DType::bf16, {64})));
  EXPECT_FALSE(overlap(k, Tensor(memory.data() + 3 * 128 + 64, DType::bf16, {64})));
}

TEST(Overlap, OfBlocks) {
  std::vector<uint8_t> memory(4 * 36);
  const Tensor rows = view(memory.data(), DType::q4_0, {2, 32}, {64, 1});  // 18 bytes, 18 between
  EXPECT_FALSE(overlap(rows, view(memory.data() + 18, DType::q4_0, {2, 32}, {64, 1})));
  EXPECT_TRUE(overlap(rows, view(memory.data() + 18, DType::q4_0, {2, 64}, {64, 1})));
}

/// Against the bytes themselves: what is said to overlap does, and with one step or none in each view nothing is missed.
TEST(Overlap, OfRandomViews) {
  std::mt19937 random(1);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  constexpr size_t kBytes = 4096;
  std::vector<uint8_t> memory(kBytes);
  int shared = 0, apart = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const int64_t step = draw(1, 40);
    Tensor pair[2];
    bool simple = true;
    for (Tensor& t : pair) {
      const DType dtype = draw(0, 1) ? DType::f32 : DType::u8;
      const int64_t unit = dtype == DType::f32 ? 4 : 1, width = draw(1, 12);
      uint8_t* begin = memory.data() + 4 * draw(0, 100);
      if (draw(0, 2) > 0) {
        t = view(begin, dtype, {draw(1, 8), width}, {(width + step) * 4 / unit, 1});
        simple = simple && pair[0].stride[0] * info_of(pair[0].dtype).block_bytes == t.stride[0] * unit;
      } else {
        t = view(begin, dtype, {draw(1, 3), draw(1, 4), width}, {draw(60, 100), width + draw(0, 4), 1});
        simple = false;
      }
    }
    const std::vector<bool> a = bytes_of(pair[0], memory.data(), kBytes),
                            b = bytes_of(pair[1], memory.data(), kBytes);
    bool truth = false;
    for (size_t i = 0; i < kBytes; ++i) truth = truth || (a[i] && b[i]);
    const bool said = overlap(pair[0], pair[1]);
    EXPECT_EQ(said, overlap(pair[1], pair[0])) << to_string(pair[0]) << " " << to_string(pair[1]);
    EXPECT_TRUE(truth || !said) << to_string(pair[0]) << " " << to_string(pair[1]);
    if (!simple) continue;
    EXPECT_EQ(said, truth) << to_string(pair[0]) << " " << to_string(pair[1]);
    ++(truth ? shared : apart);
  }
  EXPECT_GT(shared, 20);
  EXPECT_GT(apart, 20);
}

TEST(OverlapsItself, NamesTheDimensionAndWhatItHasToStepOver) {
  std::vector<float> memory(1024);
  const auto lacks = [&](std::initializer_list<int64_t> shape, std::initializer_list<int64_t> stride) {
    const auto found = overlaps_itself(view(memory.data(), DType::f32, shape, stride));
    return found ? std::pair(found->axis, found->least) : std::pair(-1, int64_t{0});
  };
  const std::pair<int, int64_t> nothing(-1, 0);
  EXPECT_EQ(lacks({4, 8}, {8, 1}), nothing);
  EXPECT_EQ(lacks({4, 8}, {11, 1}), nothing);
  EXPECT_EQ(lacks({4, 8}, {7, 1}), std::pair(0, int64_t{8}));
  EXPECT_EQ(lacks({4, 8}, {0, 1}), std::pair(0, int64_t{8}));
  EXPECT_EQ(lacks({4, 1}, {0, 1}), std::pair(0, int64_t{1}));
  EXPECT_EQ(lacks({1, 8}, {0, 1}), nothing);
  EXPECT_EQ(lacks({4, 0}, {0, 1}), nothing);
  EXPECT_EQ(lacks({3, 5, 8}, {8, 24, 1}), nothing);  // heads before tokens
  EXPECT_EQ(lacks({3, 5, 8}, {8, 23, 1}), std::pair(1, int64_t{24}));
  EXPECT_EQ(lacks({3, 5, 8}, {8, 8, 1}), std::pair(0, int64_t{40}));
  EXPECT_EQ(lacks({3, 5, 8}, {0, 0, 1}), std::pair(1, int64_t{8}));
  constexpr int64_t kOne = 1, kMost = std::numeric_limits<int64_t>::max();  // of a view that no memory holds
  EXPECT_EQ(lacks({kOne << 31, kOne << 30, 2}, {kOne << 40, kOne << 34, 1}), std::pair(0, kMost));
  EXPECT_FALSE(overlaps_itself(Tensor()));
}

/// Against the elements themselves: nothing that overlaps passes, and slices of dense tensors do, whatever their order.
TEST(OverlapsItself, OfRandomViews) {
  std::mt19937 random(2);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::vector<uint8_t> memory(4096);
  int shared = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const Tensor drawn =
        view(memory.data(), DType::u8, {draw(1, 4), draw(1, 4), draw(1, 8)}, {draw(0, 40), draw(0, 40), 1});
    const std::vector<bool> used = bytes_of(drawn, memory.data(), memory.size());
    const bool truth = std::count(used.begin(), used.end(), true) < drawn.elements();
    EXPECT_TRUE(!truth || overlaps_itself(drawn)) << to_string(drawn);
    shared += truth;

    std::array<int64_t, 3> whole{draw(1, 5), draw(1, 5), draw(1, 8)};
    Tensor slice(memory.data(), DType::u8, {whole[0], whole[1], whole[2]});
    for (size_t axis = 0; axis < 3; ++axis) {
      const int64_t every = axis < 2 ? draw(1, 2) : 1;
      slice.shape[axis] = draw(1, (whole[axis] + every - 1) / every);
      slice.stride[axis] *= every;
    }
    if (draw(0, 1)) std::swap(slice.shape[0], slice.shape[1]), std::swap(slice.stride[0], slice.stride[1]);
    EXPECT_FALSE(overlaps_itself(slice)) << to_string(slice);
  }
  EXPECT_GT(shared, 1000);
}

}  // namespace
}  // namespace vivace
