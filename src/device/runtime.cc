#include "src/device/runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "src/core/error.h"
#include "src/device/build_info.h"

#if VIVACE_CUDA
#include <cuda_runtime.h>

#include "src/device/launch.h"
#endif

namespace vivace::device {

bool compiled_with_cuda() {
#if VIVACE_CUDA
  return true;
#else
  return false;
#endif
}

Result<void*> Arena::take(int64_t bytes, std::string_view what) {
  constexpr int64_t kAlign = 256;  // what cudaMalloc gives, and enough for every TMA and vector access
  const int64_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
  if (bytes < 0 || rounded > capacity() - used_) {
    return error(Code::resource_exhausted, "arena: {} needs {} bytes, {} of {} are left", what, bytes,
                 capacity() - used_, capacity());
  }
  void* piece = static_cast<char*>(buffer_.data()) + used_;
  used_ += rounded;
  return piece;
}

Result<Arena> Arena::create(int ordinal, int64_t bytes) {
  Arena arena;
  VIVACE_TRY_ASSIGN(arena.buffer_, Buffer::on_device(ordinal, bytes));
  return arena;
}

Buffer::Buffer(Buffer&& other) noexcept {
  *this = std::move(other);
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(ordinal_, other.ordinal_);
  return *this;
}

#if VIVACE_CUDA

namespace {

using internal::cuda_status;

Status no_device(int ordinal) {
  std::string why;
  const int count = device_count(&why);
  if (count == 0) return unsupported("cuda:{} is not available: {}; see `vivace doctor`", ordinal, why);
  return invalid_argument("cuda:{} does not exist, needs 0..{}", ordinal, count - 1);
}

cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

}  // namespace

int device_count(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  if (why == nullptr) return 0;
  *why = error == cudaSuccess ? "no CUDA device" : cudaGetErrorString(error);
  if (error == cudaErrorInsufficientDriver) {  // which is also said where there is none
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (driver == nullptr) *why = "there is no NVIDIA driver (libcuda.so.1)";
    if (driver != nullptr) dlclose(driver);
  }
  return 0;
}

Result<const DeviceInfo*> device_info(int ordinal) {
  constexpr int kMost = 64;
  static std::array<std::atomic<const DeviceInfo*>, kMost> known;  // for good
  if (ordinal < 0 || ordinal >= kMost) return no_device(ordinal);
  const auto slot = static_cast<size_t>(ordinal);
  if (const DeviceInfo* found = known[slot].load(std::memory_order_acquire)) return found;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (const DeviceInfo* found = known[slot].load(std::memory_order_acquire)) return found;
  if (ordinal >= device_count()) return no_device(ordinal);
  cudaDeviceProp prop;
  VIVACE_TRY(cuda_status(cudaGetDeviceProperties(&prop, ordinal), "device properties"));
  static std::array<DeviceInfo, kMost> all;
  all[slot] = {
      .name = prop.name,
      .major = prop.major,
      .minor = prop.minor,
      .sms = prop.multiProcessorCount,
      .memory_bytes = static_cast<int64_t>(prop.totalGlobalMem),
      .l2_bytes = prop.l2CacheSize,
      .smem_per_block = static_cast<int64_t>(prop.sharedMemPerBlockOptin),
      .smem_per_sm = static_cast<int64_t>(prop.sharedMemPerMultiprocessor),
  };
  known[slot].store(&all[slot], std::memory_order_release);
  return static_cast<const DeviceInfo*>(&all[slot]);
}

Result<std::pair<int64_t, int64_t>> memory_info(int ordinal) {
  VIVACE_TRY(device_info(ordinal).status());
  const DeviceGuard guard(ordinal);
  size_t free_bytes = 0, total_bytes = 0;
  VIVACE_TRY(cuda_status(cudaMemGetInfo(&free_bytes, &total_bytes), "device memory"));
  return std::pair<int64_t, int64_t>(free_bytes, total_bytes);
}

DeviceGuard::DeviceGuard(int ordinal) {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current != ordinal && cudaSetDevice(ordinal) == cudaSuccess) {
    previous_ = current;
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

Result<Buffer> Buffer::on_device(int ordinal, int64_t bytes) {
  VIVACE_TRY(device_info(ordinal).status());
  const DeviceGuard guard(ordinal);
  Buffer buffer;
  buffer.ordinal_ = ordinal;
  buffer.bytes_ = bytes;
  VIVACE_TRY(cuda_status(cudaMalloc(&buffer.data_, static_cast<size_t>(std::max<int64_t>(bytes, 1))),
                         fmt::format("allocating {} bytes on cuda:{}", bytes, ordinal)));
  return buffer;
}

Result<Buffer> Buffer::pinned(int ordinal, int64_t bytes) {
  VIVACE_TRY(device_info(ordinal).status());
  const DeviceGuard guard(ordinal);  // else the first device gets a context
  Buffer buffer;
  buffer.bytes_ = bytes;
  VIVACE_TRY(cuda_status(cudaMallocHost(&buffer.data_, static_cast<size_t>(std::max<int64_t>(bytes, 1))),
                         fmt::format("allocating {} bytes of pinned memory", bytes)));
  return buffer;
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  if (ordinal_ < 0) {
    cudaFreeHost(data_);
  } else {
    const DeviceGuard guard(ordinal_);
    cudaFree(data_);
  }
}

Result<std::unique_ptr<OwnedStream>> OwnedStream::create(int ordinal) {
  VIVACE_TRY_ASSIGN(const DeviceInfo* info, device_info(ordinal));
  const DeviceGuard guard(ordinal);
  cudaStream_t handle = nullptr;
  VIVACE_TRY(cuda_status(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "creating a stream"));
  std::unique_ptr<OwnedStream> owned(new OwnedStream);
  owned->stream_ = {.device = Device::cuda,
                    .ordinal = ordinal,
                    .compute_capability = 10 * info->major + info->minor,
                    .handle = handle};
  return owned;
}

OwnedStream::~OwnedStream() {
  if (stream_.handle != nullptr) cudaStreamDestroy(cuda_stream(stream_));
}

Status OwnedStream::synchronize() {
  return device::synchronize(stream_);
}

Result<std::unique_ptr<Event>> Event::create(int ordinal) {
  VIVACE_TRY(device_info(ordinal).status());
  const DeviceGuard guard(ordinal);
  cudaEvent_t handle = nullptr;
  VIVACE_TRY(cuda_status(cudaEventCreate(&handle), "creating an event"));
  std::unique_ptr<Event> event(new Event);
  event->event_ = handle;
  return event;
}

Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_of(event_));
}

Status Event::record(const Stream& stream) {
  return cuda_status(cudaEventRecord(event_of(event_), cuda_stream(stream)), "recording an event");
}

Status Event::record_in_replays(const Stream& stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  VIVACE_TRY(cuda_status(cudaStreamIsCapturing(cuda_stream(stream), &capture), "looking for a capture"));
  const unsigned flags =
      capture == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal;
  return cuda_status(cudaEventRecordWithFlags(event_of(event_), cuda_stream(stream), flags),
                     "recording an event");
}

Status Event::wait(const Stream& stream) {
  return cuda_status(cudaStreamWaitEvent(cuda_stream(stream), event_of(event_)), "waiting for an event");
}

Status Event::synchronize() {
  return cuda_status(cudaEventSynchronize(event_of(event_)), "waiting for an event");
}

Result<double> Event::since(const Event& begin) const {
  float ms = 0;
  VIVACE_TRY(
      cuda_status(cudaEventElapsedTime(&ms, event_of(begin.event_), event_of(event_)), "timing events"));
  return double{ms};
}

Result<std::unique_ptr<Graph>> Graph::capture(const Stream& stream,
                                              const std::function<Status(const Stream&)>& body) {
  const DeviceGuard guard(stream.ordinal);
  VIVACE_TRY(cuda_status(cudaStreamBeginCapture(cuda_stream(stream), cudaStreamCaptureModeThreadLocal),
                         "beginning a graph capture"));
  const Status recorded = body(stream);
  cudaGraph_t graph = nullptr;
  const Status ended =
      cuda_status(cudaStreamEndCapture(cuda_stream(stream), &graph), "ending a graph capture");
  std::unique_ptr<Graph> result(new Graph);
  Status status = recorded.ok() ? ended : recorded;
  if (status.ok()) {
    cudaGraphExec_t exec = nullptr;
    status = cuda_status(cudaGraphInstantiate(&exec, graph, 0), "instantiating a graph");
    result->exec_ = exec;
  }
  if (graph != nullptr) cudaGraphDestroy(graph);
  VIVACE_TRY(status);
  return result;
}

Graph::~Graph() {
  if (exec_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(exec_));
}

Status Graph::launch(const Stream& stream) {
  const DeviceGuard guard(stream.ordinal);
  return cuda_status(cudaGraphLaunch(static_cast<cudaGraphExec_t>(exec_), cuda_stream(stream)),
                     "launching a graph");
}

namespace {

Status copy(void* destination, const void* source, int64_t bytes, cudaMemcpyKind kind, const Stream& stream) {
  if (bytes == 0) return {};
  const DeviceGuard guard(stream.ordinal);
  return cuda_status(
      cudaMemcpyAsync(destination, source, static_cast<size_t>(bytes), kind, cuda_stream(stream)),
      fmt::format("copying {} bytes", bytes));
}

}  // namespace

Status copy_to_device(void* destination, const void* source, int64_t bytes, const Stream& stream) {
  return copy(destination, source, bytes, cudaMemcpyHostToDevice, stream);
}

Status copy_to_host(void* destination, const void* source, int64_t bytes, const Stream& stream) {
  return copy(destination, source, bytes, cudaMemcpyDeviceToHost, stream);
}

Status copy_rows_to_device(void* destination, int64_t destination_stride, const void* source,
                           int64_t source_stride, int64_t row_bytes, int64_t rows, const Stream& stream) {
  if (row_bytes == 0 || rows == 0) return {};
  const DeviceGuard guard(stream.ordinal);
  return cuda_status(
      cudaMemcpy2DAsync(destination, static_cast<size_t>(destination_stride), source,
                        static_cast<size_t>(source_stride), static_cast<size_t>(row_bytes),
                        static_cast<size_t>(rows), cudaMemcpyHostToDevice, cuda_stream(stream)),
      fmt::format("copying {} rows of {} bytes", rows, row_bytes));
}

Status synchronize(const Stream& stream) {
  const DeviceGuard guard(stream.ordinal);
  return cuda_status(cudaStreamSynchronize(cuda_stream(stream)), "waiting for a stream");
}

Status copy_on_device(void* destination, const void* source, int64_t bytes, const Stream& stream) {
  return copy(destination, source, bytes, cudaMemcpyDeviceToDevice, stream);
}

Status fill(void* destination, int byte, int64_t bytes, const Stream& stream) {
  if (bytes == 0) return {};
  const DeviceGuard guard(stream.ordinal);
  return cuda_status(cudaMemsetAsync(destination, byte, static_cast<size_t>(bytes), cuda_stream(stream)),
                     fmt::format("filling {} bytes", bytes));
}

#else  // without CUDA: nothing can be created, so nothing below is reached with an object

namespace {

Status without_cuda() {
  return unsupported(
      "this build has no CUDA support ({}); configure it with VIVACE_CUDA=AUTO where nvcc is installed",
      build_info().problem);
}

}  // namespace

int device_count(std::string* why) {
  if (why) *why = without_cuda().message();
  return 0;
}
Result<const DeviceInfo*> device_info(int) {
  return without_cuda();
}
Result<std::pair<int64_t, int64_t>> memory_info(int) {
  return without_cuda();
}
DeviceGuard::DeviceGuard(int) {}
DeviceGuard::~DeviceGuard() = default;
Result<Buffer> Buffer::on_device(int, int64_t) {
  return without_cuda();
}
Result<Buffer> Buffer::pinned(int, int64_t) {
  return without_cuda();
}
Buffer::~Buffer() = default;
Result<std::unique_ptr<OwnedStream>> OwnedStream::create(int) {
  return without_cuda();
}
OwnedStream::~OwnedStream() = default;
Status OwnedStream::synchronize() {
  return without_cuda();
}
Result<std::unique_ptr<Event>> Event::create(int) {
  return without_cuda();
}
Event::~Event() = default;
Status Event::record(const Stream&) {
  return without_cuda();
}
Status Event::record_in_replays(const Stream&) {
  return without_cuda();
}
Status Event::wait(const Stream&) {
  return without_cuda();
}
Status Event::synchronize() {
  return without_cuda();
}
Result<double> Event::since(const Event&) const {
  return without_cuda();
}
Result<std::unique_ptr<Graph>> Graph::capture(const Stream&, const std::function<Status(const Stream&)>&) {
  return without_cuda();
}
Graph::~Graph() = default;
Status Graph::launch(const Stream&) {
  return without_cuda();
}
Status copy_to_device(void*, const void*, int64_t, const Stream&) {
  return without_cuda();
}
Status copy_to_host(void*, const void*, int64_t, const Stream&) {
  return without_cuda();
}
Status copy_rows_to_device(void*, int64_t, const void*, int64_t, int64_t, int64_t, const Stream&) {
  return without_cuda();
}
Status synchronize(const Stream&) {
  return without_cuda();
}
Status copy_on_device(void*, const void*, int64_t, const Stream&) {
  return without_cuda();
}
Status fill(void*, int, int64_t, const Stream&) {
  return without_cuda();
}

#endif

}  // namespace vivace::device
