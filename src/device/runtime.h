#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "vivace/status.h"
#include "vivace/stream.h"
#include "vivace/tensor.h"

// The CUDA runtime behind plain C++: what the engine and the tests need of a device, without CUDA types. Everything is
// present in a build without CUDA too; there, and on a machine without a driver, device_count() is 0 and the rest
// fails with `unsupported`.

namespace vivace::device {

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  int sms = 0;
  int64_t memory_bytes = 0, l2_bytes = 0;
  int64_t smem_per_block = 0;  ///< with the opt-in
  int64_t smem_per_sm = 0;
  bool sm90() const { return major == 9 && minor == 0; }
};

/// Whether the program was built with CUDA rows.
bool compiled_with_cuda();
/// Devices of this machine; 0 without a driver. `why` says what is missing then.
int device_count(std::string* why = nullptr);
/// Properties of one device, read once per device and kept; safe from any thread.
Result<const DeviceInfo*> device_info(int ordinal);
/// Free and total bytes now.
Result<std::pair<int64_t, int64_t>> memory_info(int ordinal);

/// Makes `ordinal` current for the calling thread while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  [[maybe_unused]] int previous_ = -1;
};

/// Device memory, or pinned host memory, freed with the object.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  static Result<Buffer> on_device(int ordinal, int64_t bytes);
  static Result<Buffer> pinned(int ordinal, int64_t bytes);

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  int ordinal_ = -1;  ///< -1: pinned host memory
};

/// One allocation handed out in aligned pieces; pieces live as long as the arena. `reset` starts over.
class Arena {
 public:
  static Result<Arena> create(int ordinal, int64_t bytes);
  /// resource_exhausted names the request and what is left.
  Result<void*> take(int64_t bytes, std::string_view what);
  void reset() { used_ = 0; }
  int64_t used() const { return used_; }
  int64_t capacity() const { return buffer_.bytes(); }

 private:
  Buffer buffer_;
  int64_t used_ = 0;
};

/// A CUDA stream of one device. `stream()` is what operators take.
class OwnedStream {
 public:
  static Result<std::unique_ptr<OwnedStream>> create(int ordinal);
  ~OwnedStream();
  const Stream& stream() const { return stream_; }
  Stream& stream() { return stream_; }
  Status synchronize();

 private:
  OwnedStream() = default;
  Stream stream_;
};

class Event {
 public:
  static Result<std::unique_ptr<Event>> create(int ordinal);
  ~Event();
  Status record(const Stream& stream);
  /// The same outside of a capture. In one it becomes a step of the graph, which each replay takes, so that since() has the
  /// times of the last replay; record() would make a dependency without a time.
  Status record_in_replays(const Stream& stream);
  /// `stream` waits for what was recorded.
  Status wait(const Stream& stream);
  Status synchronize();
  /// Milliseconds from `begin` to this event, both done.
  Result<double> since(const Event& begin) const;

 private:
  Event() = default;
  [[maybe_unused]] void* event_ = nullptr;
};

/// A captured sequence of operator calls that replays as one launch.
class Graph {
 public:
  /// Captures what `body` enqueues on `stream` and instantiates it.
  static Result<std::unique_ptr<Graph>> capture(const Stream& stream,
                                                const std::function<Status(const Stream&)>& body);
  ~Graph();
  Status launch(const Stream& stream);

 private:
  Graph() = default;
  [[maybe_unused]] void* exec_ = nullptr;
};

/// Blocks until all that was enqueued on `stream` is done.
Status synchronize(const Stream& stream);

/// Asynchronous copies on `stream`; host memory should be pinned.
Status copy_to_device(void* destination, const void* source, int64_t bytes, const Stream& stream);
Status copy_to_host(void* destination, const void* source, int64_t bytes, const Stream& stream);
/// `rows` rows of `row_bytes`; strides in bytes.
Status copy_rows_to_device(void* destination, int64_t destination_stride, const void* source, int64_t source_stride,
                           int64_t row_bytes, int64_t rows, const Stream& stream);
Status copy_on_device(void* destination, const void* source, int64_t bytes, const Stream& stream);
Status fill(void* destination, int byte, int64_t bytes, const Stream& stream);

}  // namespace vivace::device
