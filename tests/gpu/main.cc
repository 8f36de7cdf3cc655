// vivace-gpu-tests: the tests of operators and of the device layer, run on the first GPU of this machine.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <new>

#include "src/device/launch.h"
#include "src/device/runtime.h"
#include "tests/ops/op_test.h"

namespace vivace {

namespace {

// Pinned memory, which has one address on both sides: a case is filled and compared on the host and run on the device
// where it lies, and compute-sanitizer knows its bounds.
void* allocate_pinned(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "cudaHostAlloc(%zu): %s\n", bytes, cudaGetErrorString(error));
    throw std::bad_alloc();
  }
  return memory;
}

void release_pinned(void* memory) {
  cudaFreeHost(memory);
}

Status wait_for(const Stream& stream) {
  return internal::cuda_status(cudaStreamSynchronize(cuda_stream(stream)), "waiting for a row under test");
}

constexpr int kSkipped = 77;  // what test drivers take for neither passed nor failed

}  // namespace

}  // namespace vivace

int main(int argc, char** argv) {
  using namespace vivace;
  testing::InitGoogleTest(&argc, argv);
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();  // needs no GPU
  std::string why;
  if (device::device_count(&why) == 0) {
    std::printf("vivace-gpu-tests: SKIPPED, nothing was tested: %s\n", why.c_str());
    return kSkipped;
  }
  auto stream = device::OwnedStream::create(0);
  if (!stream.ok()) {
    std::printf("vivace-gpu-tests: %s\n", stream.status().message().c_str());
    return 1;
  }
  GpuUnderTest& gpu = GpuUnderTest::instance();
  gpu.streams = {(*stream)->stream()};
  gpu.memory = {.device = Device::cuda, .allocate = allocate_pinned, .release = release_pinned};
  gpu.synchronize = wait_for;
  return RUN_ALL_TESTS();
}
