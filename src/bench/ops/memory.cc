#include "src/bench/ops/memory.h"

#include <algorithm>

#include "src/cpu/machine.h"
#include "src/device/random.h"

namespace vivace::bench {

Result<Tensor> DeviceTensors::make(DType dtype, std::initializer_list<int64_t> shape, const Stream& stream) {
  Tensor tensor(nullptr, dtype, shape, Device::cuda);
  VIVACE_TRY_ASSIGN(device::Buffer buffer,
                    device::Buffer::on_device(stream.ordinal, std::max<int64_t>(1, tensor.bytes())));
  tensor.data = buffer.data();
  memory_.push_back(std::move(buffer));
  return tensor;
}

Result<Tensor> DeviceTensors::random(DType dtype, std::initializer_list<int64_t> shape, double deviation,
                                     uint64_t seed, const Stream& stream) {
  VIVACE_TRY_ASSIGN(const Tensor tensor, make(dtype, shape, stream));
  VIVACE_TRY(device::fill_normal(tensor, static_cast<float>(deviation), seed, stream));
  return tensor;
}

Result<Tensor> DeviceTensors::copy_of_bytes(const void* values, DType dtype, std::initializer_list<int64_t> shape,
                                            const Stream& stream) {
  VIVACE_TRY_ASSIGN(const Tensor tensor, make(dtype, shape, stream));
  VIVACE_TRY(device::copy_to_device(tensor.data, values, tensor.bytes(), stream));
  VIVACE_TRY(device::synchronize(stream));  // the caller's memory may go
  return tensor;
}

Result<HostTensor> download(const Tensor& tensor, const Stream& stream) {
  HostTensor host;
  host.memory.resize(static_cast<size_t>(tensor.bytes()));
  host.tensor = tensor;
  host.tensor.device = Device::cpu;
  host.tensor.data = host.memory.data();
  VIVACE_TRY(device::copy_to_host(host.memory.data(), tensor.data, tensor.bytes(), stream));
  VIVACE_TRY(device::synchronize(stream));
  return host;
}

cpu::ThreadPool& check_threads() {
  static cpu::ThreadPool threads(std::min(cpu::usable_cores(), 16));
  return threads;
}

}  // namespace vivace::bench
