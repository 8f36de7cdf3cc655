#include "src/engine/compute.h"

#include <algorithm>
#include <charconv>
#include <string>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/cpu/machine.h"
#include "src/engine/check_options.h"

namespace vivace::engine {

Result<DeviceName> parse_device(std::string_view text) {
  if (text == "cpu") return DeviceName{};
  if (text == "cuda") return DeviceName{.device = Device::cuda};
  constexpr std::string_view kPrefix = "cuda:";
  int ordinal = 0;
  const char* end = text.data() + text.size();
  if (text.starts_with(kPrefix)) {
    const auto [stop, error] = std::from_chars(text.data() + kPrefix.size(), end, ordinal);
    if (error == std::errc() && stop == end && ordinal >= 0) {
      return DeviceName{.device = Device::cuda, .ordinal = ordinal};
    }
  }
  return invalid_argument("device is '{}', needs cpu, cuda or cuda:N", text);
}

Result<std::unique_ptr<Compute>> Compute::create(std::string_view device, int threads) {
  std::unique_ptr<Compute> compute(new Compute);
  VIVACE_TRY_ASSIGN(compute->device_, parse_device(device));
  if (compute->device_.device == Device::cuda) {
    auto stream = device::OwnedStream::create(compute->device_.ordinal);
    if (!stream.ok()) {
      const Status why = stream.status().at(fmt::format("device is '{}'", device));
      if (why.code() != Code::unsupported) return why;
      return Status(why.code(), why.message() + "; models from files run with --device cpu too");
    }
    compute->stream_ = std::move(*stream);
    return compute;
  }
  const int count = threads > 0 ? threads : std::min(cpu::usable_cores(), kMaxThreads);
  VIVACE_TRY(guarded(fmt::format("engine: threads is {}", count), [&] {
    compute->threads_ = std::make_unique<cpu::ThreadPool>(count);
    return Status();
  }));
  return compute;
}

Stream Compute::stream(Dispatch* dispatch) const {
  Stream stream = stream_ != nullptr ? stream_->stream() : Stream{.threads = threads_.get()};
  stream.dispatch = dispatch;
  return stream;
}

}  // namespace vivace::engine
