#pragma once

#include <array>
#include <cstring>
#include <limits>
#include <set>

#include "tests/model/altered_checkpoint.h"

// Decode steps in the rows of larger ones.

namespace vivace::testing {

/// The model with NaN as the embedding of id 0, which is what padding computes.
inline std::shared_ptr<const model::Checkpoint> with_poisoned_padding(const std::string& path) {
  const std::string name = "model.embed_tokens.weight";
  auto altered = std::make_shared<AlteredCheckpoint>(path);
  const auto table = altered->tensor(name);
  EXPECT_TRUE(table.ok() && table->dtype == DType::bf16);
  const Tensor poisoned = altered->make(DType::bf16, {table->shape[0], table->shape[1]});
  std::memcpy(poisoned.data, table->data, static_cast<size_t>(table->bytes()));
  std::fill_n(poisoned.as<uint16_t>(), table->shape[1], uint16_t{0x7fc0});
  altered->replace(name, poisoned);
  return altered;
}

/// What the model counts behind its last step: distinct experts over all MoE layers, and those layers.
inline std::array<int64_t, 2> counted_experts(LoadedModel& loaded) {
  std::array<int64_t, 2> sums = {};
  const Stream stream = loaded.stream();
  const auto count = model::Memory::reserve(sizeof(sums), "a count of experts", stream);
  EXPECT_TRUE(count.ok()) << count.status().message();
  if (!count.ok()) return sums;
  Status status = loaded.model().count_experts(count->tensor(DType::i64, {2}), stream);
  if (stream.device == Device::cpu) {
    std::memcpy(sums.data(), count->data(), sizeof(sums));
  } else {
    if (status.ok()) status = device::copy_to_host(sums.data(), count->data(), sizeof(sums), stream);
    if (status.ok()) status = device::synchronize(stream);
  }
  EXPECT_TRUE(status.ok()) << status.message();
  return sums;
}

/// Requests that decode in steps of their own number and, beside them, in padded ones: the logits and the experts of each
/// are the same bits, though everything in the rows of padding is NaN; and padding touches no expert.
inline void expect_padding_changes_nothing(const std::string& path, const model::ModelOptions& options) {
  constexpr int64_t kRequests = 5, kPoisoned = 16, kTokens = 64;
  model::ModelOptions with_room = options;
  with_room.max_tokens = with_room.max_requests = kPoisoned;
  LoadedModel loaded(with_poisoned_padding(path), with_room, kTokens, 2 * kRequests + kPoisoned);
  ASSERT_TRUE(loaded.ok());
  std::mt19937 random(1);
  const auto id = [&] {
    return static_cast<int32_t>(1 + random() % static_cast<uint32_t>(loaded.model().config().vocab - 1));
  };
  std::vector<Conversation> plain, padded, poisoned;
  for (int64_t i = 0; i < kRequests; ++i) {
    std::vector<int32_t> prompt(static_cast<size_t>(1 + 9 * i));
    std::ranges::generate(prompt, id);
    plain.push_back(loaded.conversation(2 * i));
    padded.push_back(loaded.conversation(2 * i + 1));
    loaded.feed(plain.back(), prompt, kPoisoned);
    loaded.feed(padded.back(), prompt, kPoisoned);
  }
  // What steps leave in the buffers between the operators.
  const int32_t poison = 0;
  StepBuilder all = loaded.step();
  for (int64_t i = 0; i < kPoisoned; ++i) {
    poisoned.push_back(loaded.conversation(2 * kRequests + i));
    all.add(poisoned.back(), std::span(&poison, 1), Rows::last, true);
  }
  all.run(loaded.stream());

  using Routes = std::vector<std::vector<int32_t>>;
  Routes routes;
  loaded.model().observe_routes([&](int64_t, const Tensor& ids) {
    const auto* all_ids = ids.as<const int32_t>();
    routes.emplace_back(all_ids, all_ids + ids.elements());
  });
  const struct { int64_t requests, bucket; } kSteps[] = {{5, 8}, {5, 5}, {3, 4}, {4, 16}, {1, 8}, {5, 16}};
  for (const auto& [requests, bucket] : kSteps) {
    SCOPED_TRACE(::testing::Message() << requests << " requests in " << bucket << " rows");
    StepBuilder as_is = loaded.step(), larger = loaded.step();
    std::vector<int32_t> ids(static_cast<size_t>(requests));
    std::ranges::generate(ids, id);
    for (int64_t i = 0; i < requests; ++i) {
      as_is.add(plain[i], std::span(&ids[i], 1), Rows::last, true);
      larger.add(padded[i], std::span(&ids[i], 1), Rows::last, true);
    }
    routes.clear();
    const auto want = as_is.run(loaded.stream());
    const Routes want_routes = std::exchange(routes, {});
    const auto got = larger.run(loaded.stream(), bucket);
    std::array<int64_t, 2> touched = {0, std::ssize(want_routes)};
    for (const std::vector<int32_t>& layer : want_routes)
      touched[0] += std::ssize(std::set<int32_t>(layer.begin(), layer.end()));
    EXPECT_EQ(counted_experts(loaded), touched);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_FALSE(std::isnan(want[i].back()));
      EXPECT_EQ(std::memcmp(got[i].data(), want[i].data(), want[i].size() * sizeof(float)), 0)
          << "request " << i;
    }
    ASSERT_FALSE(routes.empty());
    ASSERT_EQ(routes.size(), want_routes.size());
    for (size_t i = 0; i < routes.size(); ++i) {
      const size_t real = want_routes[i].size();
      EXPECT_EQ(std::vector(routes[i].begin(), routes[i].begin() + static_cast<int64_t>(real)),
                want_routes[i]);
      EXPECT_EQ(std::vector(routes[i].begin() + static_cast<int64_t>(real), routes[i].end()),
                std::vector<int32_t>(routes[i].size() - real, -1));
      EXPECT_EQ(routes[i].size(), real / static_cast<size_t>(requests) * static_cast<size_t>(bucket));
    }
  }
}

}  // namespace vivace::testing
