#include "src/model/router_inputs.h"

#include <fmt/format.h>

#include <cstring>

#include "src/device/runtime.h"
#include "src/model/safetensors_writer.h"

namespace vivace::model {

Model::CallObserver RouterInputs::observer() {
  return {.router_gemm = [this](int64_t layer, const RouterGemmArgs& args) { return see(layer, args.x); }};
}

Status RouterInputs::see(int64_t layer, const Tensor& x) {  // dense: the first rows of a buffer
  Rows& rows = layers_[layer];
  rows.dtype = x.dtype;
  rows.hidden = x.shape[1];
  const size_t before = rows.bytes.size();
  rows.bytes.resize(before + static_cast<size_t>(x.bytes()));
  uint8_t* to = rows.bytes.data() + before;
  if (stream_.device == Device::cpu) {
    std::memcpy(to, x.data, static_cast<size_t>(x.bytes()));
    return {};
  }
  VIVACE_TRY(device::copy_to_host(to, x.data, x.bytes(), stream_));
  return device::synchronize(stream_);
}

Status RouterInputs::write(const std::string& path) const {
  std::vector<SafetensorsSlot> slots;
  for (const auto& [layer, rows] : layers_) {
    const int64_t element = info_of(rows.dtype).block_bytes;
    const auto bytes = static_cast<int64_t>(rows.bytes.size());
    slots.push_back({.name = fmt::format("model.layers.{}.router_input", layer),
                     .type_name = rows.dtype == DType::bf16 ? "BF16" : "F32",
                     .shape = {bytes / (element * rows.hidden), rows.hidden},
                     .bytes = bytes,
                     .element_bytes = element});
  }
  SafetensorsWriter writer;
  VIVACE_TRY(writer.open(path, slots));
  size_t slot = 0;
  for (const auto& [layer, rows] : layers_) VIVACE_TRY(writer.write(slot++, rows.bytes.data()));
  return writer.close();
}

}  // namespace vivace::model
