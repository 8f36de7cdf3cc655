#include "src/device/runtime.h"

#include <gtest/gtest.h>

#include <cstring>

namespace vivace::device {
namespace {

TEST(DeviceRuntime, WithoutADeviceEveryCreationSaysWhatIsMissing) {
  std::string why;
  if (device_count(&why) > 0) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_FALSE(why.empty());
  for (const Status& status : {device_info(0).status(), memory_info(0).status(), Buffer::on_device(0, 16).status(),
                               Arena::create(0, 16).status(), OwnedStream::create(0).status(),
                               Event::create(0).status()}) {
    EXPECT_EQ(status.code(), Code::unsupported) << status.message();
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  }
}

TEST(DeviceRuntime, ADeviceThatDoesNotExistIsRefusedByNumber) {
  const int count = device_count();
  if (count == 0) GTEST_SKIP() << "no GPU on this machine";
  const Status status = device_info(count).status();
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_NE(status.message().find("cuda:" + std::to_string(count)), std::string::npos) << status.message();
}

TEST(DeviceRuntime, ArenaPiecesAreAlignedAndBounded) {
  if (device_count() == 0) GTEST_SKIP() << "no GPU on this machine";
  Result<Arena> arena = Arena::create(0, 1024);
  ASSERT_TRUE(arena.ok()) << arena.status().message();
  Result<void*> first = arena->take(1, "first"), second = arena->take(700, "second");
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(static_cast<char*>(*second) - static_cast<char*>(*first), 256);
  const Status full = arena->take(1, "third").status();
  EXPECT_EQ(full.code(), Code::resource_exhausted);
  EXPECT_NE(full.message().find("third needs 1 bytes, 0 of 1024"), std::string::npos) << full.message();
}

TEST(DeviceRuntime, AGraphReplaysWithWhatItsInputsHoldThen) {
  if (device_count() == 0) GTEST_SKIP() << "no GPU on this machine";
  auto owned = OwnedStream::create(0);
  auto source = Buffer::pinned(0, 16), target = Buffer::pinned(0, 16), middle = Buffer::on_device(0, 16);
  ASSERT_TRUE(owned.ok() && source.ok() && target.ok() && middle.ok());
  const Stream& stream = (*owned)->stream();
  auto graph = Graph::capture(stream, [&](const Stream& s) -> Status {
    VIVACE_TRY(copy_to_device(middle->data(), source->data(), 16, s));
    return copy_to_host(target->data(), middle->data(), 16, s);
  });
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  for (int byte : {7, 42}) {
    std::memset(source->data(), byte, 16);
    ASSERT_TRUE((*graph)->launch(stream).ok());
    ASSERT_TRUE((*owned)->synchronize().ok());
    EXPECT_EQ(std::memcmp(target->data(), source->data(), 16), 0);
  }
}

TEST(DeviceRuntime, EventsInAGraphAreRecordedByEachReplay) {
  if (device_count() == 0) GTEST_SKIP() << "no GPU on this machine";
  constexpr int64_t kBytes = int64_t{256} << 20;
  auto owned = OwnedStream::create(0);
  auto memory = Buffer::on_device(0, kBytes);
  auto launched = Event::create(0), before = Event::create(0), after = Event::create(0);
  ASSERT_TRUE(owned.ok() && memory.ok() && launched.ok() && before.ok() && after.ok());
  const Stream& stream = (*owned)->stream();
  const auto timed_fill = [&](const Stream& s) -> Status {
    VIVACE_TRY((*before)->record_in_replays(s));
    VIVACE_TRY(fill(memory->data(), 1, kBytes, s));
    return (*after)->record_in_replays(s);
  };
  auto graph = Graph::capture(stream, timed_fill);
  ASSERT_TRUE(graph.ok()) << graph.status().message();
  const auto expect_fresh_times = [&](const Status& run) {
    ASSERT_TRUE(run.ok()) << run.message();
    ASSERT_TRUE((*owned)->synchronize().ok());
    const auto waited = (*before)->since(**launched), filled = (*after)->since(**before);
    ASSERT_TRUE(waited.ok()) << waited.status().message();
    ASSERT_TRUE(filled.ok()) << filled.status().message();
    EXPECT_GE(*waited, 0) << "the times of an earlier replay";
    EXPECT_GT(*filled, 0.02) << "256 MB cannot be written in less";
  };
  for (int replay = 0; replay < 3; ++replay) {
    ASSERT_TRUE((*launched)->record(stream).ok());
    expect_fresh_times((*graph)->launch(stream));
  }
  ASSERT_TRUE((*launched)->record(stream).ok());
  expect_fresh_times(timed_fill(stream));  // outside of a capture
}

}  // namespace
}  // namespace vivace::device
