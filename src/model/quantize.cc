#include "src/model/quantize.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string_view>
#include <utility>

#include "src/core/error.h"
#include "src/core/guard.h"
#include "src/core/number.h"
#include "src/cpu/thread_pool.h"
#include "src/model/hf_names.h"
#include "src/model/json.h"
#include "src/model/mapped_checkpoint.h"
#include "src/model/safetensors.h"
#include "src/model/safetensors_writer.h"
#include "src/model/synthetic.h"
#include "src/model/weights.h"
#include "src/ops/linear/block_formats.h"
#include "src/ops/quantize_fp8/quantize.h"

namespace vivace::model {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kMaxTextBytes = size_t{16} << 20;
constexpr int64_t kBlock = kFp8ScaleBlock;

/// What a matrix is multiplied by, as calibration measures it.
enum class Input { qkv, o, mlp, down, shared_down, expert_down };

/// A matrix to quantise, or (rows == 0) a tensor to keep.
struct Unit {
  const SafetensorsEntry* entry = nullptr;  ///< null: the scales of a layer's keys and values
  std::string stem;                         ///< output names are stem + ".weight", ".weight_scale", ...
  int64_t offset = 0;                       ///< of the matrix in the entry, in elements
  int64_t rows = 0, columns = 0;
  int64_t layer = 0, expert = 0;
  Input input = Input::qkv;
  size_t group = 0;

  bool quantised() const { return rows > 0; }
};

constexpr std::string_view kGroupNames[] = {"attention", "dense mlp", "experts", "shared experts"};

struct Target {
  Input input;
  size_t group;
};

/// What `part`, the canonical name behind the layer's number, is among the matrices to quantise.
struct Match {
  bool found = false;
  Target target{};
  int64_t expert = -1;   ///< of one stored by itself
  bool stacked = false;  ///< [experts, rows, columns]
  bool gate_and_up = false;
};

Match match(std::string_view part) {
  const struct {
    std::string_view name;
    Target target;
  } kMatrices[] = {
      {"self_attn.q_proj.weight", {Input::qkv, 0}},
      {"self_attn.k_proj.weight", {Input::qkv, 0}},
      {"self_attn.v_proj.weight", {Input::qkv, 0}},
      {"self_attn.o_proj.weight", {Input::o, 0}},
      {"mlp.gate_proj.weight", {Input::mlp, 1}},
      {"mlp.up_proj.weight", {Input::mlp, 1}},
      {"mlp.down_proj.weight", {Input::down, 1}},
      {"mlp.shared_mlp.gate_proj.weight", {Input::mlp, 3}},
      {"mlp.shared_mlp.up_proj.weight", {Input::mlp, 3}},
      {"mlp.shared_mlp.down_proj.weight", {Input::shared_down, 3}},
  };
  for (const auto& matrix : kMatrices) {
    if (part == matrix.name) return {.found = true, .target = matrix.target};
  }
  constexpr std::string_view kExperts = "mlp.experts.";
  if (!part.starts_with(kExperts)) return {};
  part.remove_prefix(kExperts.size());
  if (part == "gate_up_proj")
    return {.found = true, .target = {Input::mlp, 2}, .stacked = true, .gate_and_up = true};
  if (part == "down_proj") return {.found = true, .target = {Input::expert_down, 2}, .stacked = true};
  int64_t expert = -1;
  const auto [rest, failure] = std::from_chars(part.data(), part.data() + part.size(), expert);
  if (failure != std::errc()) return {};
  part.remove_prefix(static_cast<size_t>(rest - part.data()));
  if (part == ".gate_proj.weight" || part == ".up_proj.weight") {
    return {.found = true, .target = {Input::mlp, 2}, .expert = expert};
  }
  if (part == ".down_proj.weight")
    return {.found = true, .target = {Input::expert_down, 2}, .expert = expert};
  return {};
}

/// Everything of the source folder.
struct Source {
  ModelConfig config;
  std::string config_text;
  std::vector<std::shared_ptr<MappedFile>> files;
  std::vector<std::vector<SafetensorsEntry>> entries;  ///< of each file
  int64_t bytes = 0;
};

Result<Source> open_source(const std::string& folder) {
  Source source;
  VIVACE_TRY_ASSIGN(source.config_text, read_text_file(folder + "/config.json", kMaxTextBytes));
  Result<ModelConfig> config = parse_hf_config(source.config_text);
  if (!config.ok()) return config.status().at(folder);
  source.config = std::move(*config);
  if (source.config.weight_format != WeightFormat::plain) {
    return unsupported("{}: the model is quantised already ({})", folder,
                       name_of(source.config.weight_format));
  }
  VIVACE_TRY_ASSIGN(const WeightFiles files, hf_weight_files(folder));
  for (const auto& [name, listed] : files) {
    const std::string path = folder + "/" + name;
    VIVACE_TRY_ASSIGN(std::shared_ptr<MappedFile> file, MappedFile::open(path));
    Result<std::vector<SafetensorsEntry>> entries = parse_safetensors(file->bytes());
    if (!entries.ok()) return entries.status().at(path);
    std::erase_if(*entries, [&listed = listed](const SafetensorsEntry& e) {
      return !listed.empty() && !listed.contains(e.name);
    });
    for (const SafetensorsEntry& entry : *entries) source.bytes += static_cast<int64_t>(entry.data.size());
    source.files.push_back(std::move(file));
    source.entries.push_back(std::move(*entries));
  }
  return source;
}

bool is_plain(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

int64_t elements_of(const SafetensorsEntry& entry) {
  return std::accumulate(entry.shape.begin(), entry.shape.end(), int64_t{1}, std::multiplies<>());
}

/// The units of one tensor of the source.
Status plan_entry(const ModelConfig& config, const SafetensorsEntry& entry, std::vector<Unit>& units) {
  VIVACE_TRY_ASSIGN(const HfName name, hf_tensor_name(config, entry.name));
  Match found;
  int64_t layer = -1;
  constexpr std::string_view kLayers = "model.layers.";
  if (name.use == HfName::Use::keep && name.canonical.starts_with(kLayers)) {
    const char* end = name.canonical.data() + name.canonical.size();
    const char* rest = std::from_chars(name.canonical.data() + kLayers.size(), end, layer).ptr;
    found = match({rest + 1, static_cast<size_t>(end - rest - 1)});
  }
  if (!found.found) {
    units.push_back({.entry = &entry, .layer = layer});
    return {};
  }
  if (!is_plain(entry.dtype)) {
    return unsupported("{} is {}, needs F32, F16 or BF16 to be quantised", entry.name, entry.type_name);
  }
  if (entry.shape.size() != (found.stacked ? 3u : 2u) || entry.data.empty()) {
    return invalid_argument("{} has shape [{}], needs {} dimensions, none of them 0", entry.name,
                            fmt::join(entry.shape, ", "), found.stacked ? 3 : 2);
  }
  VIVACE_TRY(to_tensor(entry).status());  // aligned
  Unit unit{.entry = &entry,
            .rows = entry.shape[entry.shape.size() - 2],
            .columns = entry.shape.back(),
            .layer = layer,
            .expert = found.expert,
            .input = found.target.input,
            .group = found.target.group};
  if (!found.stacked) {
    if (found.expert >= config.experts) {
      return invalid_argument("{} is of expert {}, needs one below {}", entry.name, found.expert,
                              config.experts);
    }
    unit.stem = entry.name.substr(0, entry.name.rfind('.'));
    units.push_back(unit);
    return {};
  }
  if (entry.shape[0] != config.experts || (found.gate_and_up && unit.rows % 2 != 0)) {
    return invalid_argument("{} has shape [{}], needs {} experts{}", entry.name, fmt::join(entry.shape, ", "),
                            config.experts, found.gate_and_up ? " with an even number of rows" : "");
  }
  // "...experts.gate_up_proj" becomes "...experts.E.gate_proj" and "...experts.E.up_proj".
  const std::string prefix = entry.name.substr(0, entry.name.rfind('.') + 1);
  const int64_t per_expert = unit.rows * unit.columns;
  if (found.gate_and_up) unit.rows /= 2;
  for (int64_t e = 0; e < config.experts; ++e) {
    unit.expert = e;
    unit.offset = e * per_expert;
    unit.stem = fmt::format("{}{}.{}", prefix, e, found.gate_and_up ? "gate_proj" : "down_proj");
    units.push_back(unit);
    if (!found.gate_and_up) continue;
    unit.offset += unit.rows * unit.columns;
    unit.stem = fmt::format("{}{}.up_proj", prefix, e);
    units.push_back(unit);
  }
  return {};
}

std::string_view type_name_of(DType dtype) {
  return dtype == DType::f32 ? "F32" : dtype == DType::bf16 ? "BF16" : "F8_E4M3";
}

SafetensorsSlot slot_of(std::string name, DType dtype, std::vector<int64_t> shape) {
  const int64_t element = info_of(dtype).block_bytes;
  const int64_t bytes = std::accumulate(shape.begin(), shape.end(), element, std::multiplies<>());
  return {std::move(name), std::string(type_name_of(dtype)), std::move(shape), bytes, element};
}

/// What weights lose, summed over some of them.
struct Loss {
  double error_squares = 0, squares = 0, relative_errors = 0;
  int64_t weights = 0, lost = 0;

  void add(float weight, float now) {
    const double error = double{now} - weight;
    error_squares += error * error;
    squares += double{weight} * weight;  // shows a weight that is not finite
    if (weight == 0) return;
    relative_errors += std::abs(error / weight);
    ++weights;
    lost += now == 0;
  }
  void add(const Loss& other) {
    error_squares += other.error_squares;
    squares += other.squares;
    relative_errors += other.relative_errors;
    weights += other.weights;
    lost += other.lost;
  }
};

/// A quantised matrix in memory.
struct Quantised {
  std::vector<uint8_t> values;
  std::vector<uint8_t> scales;  ///< in the type of the file
  Loss loss;
};

class Quantiser {
 public:
  Quantiser(const Source& source, const std::string& out, const QuantizeOptions& options,
            const Stream& stream)
      : source_(source), out_(out), options_(options), stream_(stream) {}

  Status plan() {
    for (size_t i = 0; i < source_.files.size(); ++i) {
      for (const SafetensorsEntry& entry : source_.entries[i])
        VIVACE_TRY(plan_entry(source_.config, entry, units_).at(source_.files[i]->path()));
    }
    if (options_.calibration != nullptr) {
      for (int64_t l = 0; l < source_.config.layers; ++l) units_.push_back({.layer = l});
    }
    for (const std::string_view name : kGroupNames) result_.groups.push_back({.name = std::string(name)});
    count_unvisited();
    return {};
  }

  /// Files in order; `written` gets each path before the file is made.
  Status write(std::vector<std::string>& written) {
    std::vector<std::vector<const Unit*>> shards(1);
    int64_t shard_bytes = 0, total = 0;
    for (const Unit& unit : units_) {
      int64_t bytes = 0;
      for (const SafetensorsSlot& slot : slots_of(unit)) bytes += slot.bytes;
      if (!shards.back().empty() && shard_bytes + bytes > options_.max_shard_bytes) {
        shards.emplace_back();
        shard_bytes = 0;
      }
      shards.back().push_back(&unit);
      shard_bytes += bytes;
      total += bytes;
    }
    json weight_map = json::object();
    for (size_t s = 0; s < shards.size(); ++s) {
      const std::string name = shards.size() == 1
                                   ? "model.safetensors"
                                   : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards.size());
      written.push_back(out_ + "/" + name);
      VIVACE_TRY(write_shard(written.back(), shards[s]));
      for (const Unit* unit : shards[s]) {
        for (const SafetensorsSlot& slot : slots_of(*unit)) weight_map[slot.name] = name;
      }
    }
    result_.files = static_cast<int64_t>(shards.size());
    if (shards.size() == 1) return {};
    written.push_back(out_ + "/model.safetensors.index.json");
    const json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    return write_text(written.back(), index.dump(2) + "\n");
  }

  /// config.json of the result.
  std::string config() const {
    auto config = nlohmann::ordered_json::parse(source_.config_text);
    nlohmann::ordered_json kept = nlohmann::ordered_json::array();
    for (const Unit& unit : units_) {
      if (unit.quantised() || unit.entry == nullptr || unit.entry->shape.size() != 2) continue;
      const std::string& name = unit.entry->name;
      if (name.ends_with(".weight")) kept.push_back(name.substr(0, name.rfind('.')));
    }
    if (source_.config.tied_embeddings) kept.push_back("lm_head");
    nlohmann::ordered_json quantisation = {{"quant_method", "fp8"}, {"fmt", "e4m3"}};
    if (blocks()) {
      quantisation["activation_scheme"] = "dynamic";
      quantisation["weight_block_size"] = {kBlock, kBlock};
      quantisation["modules_to_not_convert"] = kept;
    } else {
      quantisation["activation_scheme"] = "static";
      quantisation["ignored_layers"] = kept;
    }
    if (options_.calibration != nullptr) quantisation["kv_cache_scheme"] = "static";
    config["quantization_config"] = quantisation;
    return config.dump(2) + "\n";
  }

  QuantizeResult take() {
    std::erase_if(result_.groups, [](const QuantizedGroup& group) { return group.matrices == 0; });
    return std::move(result_);
  }

  /// An error when the caller wants no more.
  Status check_stop() const {
    if (!options_.stop || !options_.stop()) return {};
    return error(Code::cancelled, "{}: quantize was interrupted; what it had written is removed", out_);
  }

  static Status write_text(const std::string& path, const std::string& text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    file.close();
    if (!file) return io_error("{}: cannot be written", path);
    return {};
  }

 private:
  bool blocks() const { return options_.format == WeightFormat::fp8_block128; }

  /// The tensors that a unit becomes, in the order in which write_unit() fills them.
  std::vector<SafetensorsSlot> slots_of(const Unit& unit) const {
    if (unit.entry == nullptr) {
      const std::string prefix = fmt::format("model.layers.{}.self_attn.", unit.layer);
      return {slot_of(prefix + "k_cache.scale", DType::f32, {1}),
              slot_of(prefix + "v_cache.scale", DType::f32, {1})};
    }
    if (!unit.quantised()) {
      const SafetensorsEntry& entry = *unit.entry;
      const auto bytes = static_cast<int64_t>(entry.data.size());
      return {{entry.name, entry.type_name, entry.shape, bytes,
               bytes / std::max<int64_t>(1, elements_of(entry))}};
    }
    std::vector<SafetensorsSlot> slots = {
        slot_of(unit.stem + ".weight", DType::fp8_e4m3, {unit.rows, unit.columns})};
    if (blocks()) {
      slots.push_back(slot_of(unit.stem + ".weight_scale_inv", options_.scale_type,
                              {scale_blocks(unit.rows), scale_blocks(unit.columns)}));
    } else {
      slots.push_back(slot_of(unit.stem + ".weight_scale", options_.scale_type, {}));
      slots.push_back(slot_of(unit.stem + ".input_scale", DType::f32, {1}));
    }
    return slots;
  }

  Status write_shard(const std::string& path, const std::vector<const Unit*>& units) {
    std::vector<SafetensorsSlot> slots;
    for (const Unit* unit : units) {
      const auto more = slots_of(*unit);
      slots.insert(slots.end(), more.begin(), more.end());
    }
    SafetensorsWriter writer;
    VIVACE_TRY(writer.open(path, slots));
    size_t slot = 0;
    for (const Unit* unit : units) {
      VIVACE_TRY(check_stop());
      VIVACE_TRY(write_unit(*unit, writer, slot));
      slot += slots_of(*unit).size();
    }
    return writer.close();
  }

  Status write_unit(const Unit& unit, SafetensorsWriter& writer, size_t slot) {
    if (unit.entry == nullptr) {
      const LayerRanges& ranges = options_.calibration->layers[unit.layer];
      const float k = given_scale(ranges.k), v = given_scale(ranges.v);
      VIVACE_TRY(writer.write(slot, &k));
      return writer.write(slot + 1, &v);
    }
    if (!unit.quantised()) {
      VIVACE_TRY(check_finite(*unit.entry));
      VIVACE_TRY(writer.write(slot, unit.entry->data.data()));
      ++result_.kept_tensors;
      result_.kept_bytes += static_cast<int64_t>(unit.entry->data.size());
      advance(unit.entry->data);
      return {};
    }
    const Quantised q = quantise(unit);
    if (!std::isfinite(q.loss.squares)) {
      return invalid_argument("{} has a weight that is not finite; no scale fits it", unit.entry->name);
    }
    VIVACE_TRY(writer.write(slot, q.values.data()));
    VIVACE_TRY(writer.write(slot + 1, q.scales.data()));
    if (!blocks()) {
      const float scale = given_scale(range_of(unit));
      VIVACE_TRY(writer.write(slot + 2, &scale));
    }
    QuantizedGroup& group = result_.groups[unit.group];
    const int64_t elements = unit.rows * unit.columns, element = info_of(unit.entry->dtype).block_bytes;
    ++group.matrices;
    group.bytes_before += elements * element;
    for (const SafetensorsSlot& s : slots_of(unit)) group.bytes_after += s.bytes;
    group.error_squares += q.loss.error_squares;
    group.squares += q.loss.squares;
    group.weights += q.loss.weights;
    group.lost += q.loss.lost;
    const double mean = q.loss.relative_errors / static_cast<double>(std::max<int64_t>(1, q.loss.weights));
    if (mean > group.worst_mean_error) {
      group.worst_mean_error = mean;
      group.worst_matrix = unit.stem + ".weight";
    }
    advance(unit.entry->data.subspan(static_cast<size_t>(unit.offset * element),
                                     static_cast<size_t>(elements * element)));
    return {};
  }

  /// Of a tensor that is kept: the model could be loaded, and would compute nothing but NaN.
  Status check_finite(const SafetensorsEntry& entry) const {
    if (!is_plain(entry.dtype)) return {};
    constexpr int64_t kPiece = 1 << 16;
    const int64_t count = elements_of(entry), element = info_of(entry.dtype).block_bytes;
    const int64_t pieces = (count + kPiece - 1) / kPiece;
    std::vector<int64_t> found(static_cast<size_t>(pieces), -1);  // the first of each piece
    cpu::parallel_for(stream_.threads, pieces, [&](int64_t piece, int) {
      const int64_t begin = piece * kPiece, size = std::min(kPiece, count - begin);
      std::vector<float> values(static_cast<size_t>(size));
      dequantize_row(entry.dtype, entry.data.data() + begin * element, size, values.data());
      const auto wrong = std::ranges::find_if_not(values, [](float v) { return std::isfinite(v); });
      if (wrong != values.end()) found[piece] = begin + (wrong - values.begin());
    });
    const auto first = std::ranges::find_if(found, [](int64_t i) { return i >= 0; });
    if (first == found.end()) return {};
    float value = 0;
    dequantize_row(entry.dtype, entry.data.data() + *first * element, 1, &value);
    return invalid_argument("{}: element {} is {}, needs a finite number", entry.name, *first, value);
  }

  /// `part` of the source was read and is not needed again.
  void advance(std::span<const uint8_t> part) {
    for (const auto& file : source_.files) file->drop_pages(part);
    done_ += static_cast<int64_t>(part.size());
    if (options_.progress) options_.progress(done_, source_.bytes);
  }

  /// The scale of values up to `range`: 448 of it reach that, with the margin. What was always 0 may be anything.
  float given_scale(float range) const {
    return range > 0 ? made_scale(double{range} * options_.margin) : 1.f;
  }

  float range_of(const Unit& unit) const {
    const LayerRanges& ranges = options_.calibration->layers[unit.layer];
    switch (unit.input) {
      case Input::qkv:
        return ranges.qkv;
      case Input::o:
        return ranges.o;
      case Input::mlp:
        return ranges.mlp;
      case Input::down:
        return ranges.down;
      case Input::shared_down:
        return ranges.shared_down;
      case Input::expert_down:
        break;
    }
    const std::vector<float>& experts = ranges.experts_down;
    const float own = experts[unit.expert];
    return own > 0 ? own : *std::max_element(experts.begin(), experts.end());
  }

  void count_unvisited() {
    if (options_.calibration == nullptr || blocks()) return;
    for (const LayerRanges& ranges : options_.calibration->layers) {
      result_.unvisited_experts += std::count(ranges.experts_down.begin(), ranges.experts_down.end(), 0.f);
    }
  }

  /// A scale as the file will have it: the values are quantised by what a reader sees.
  float stored_scale(float scale) const {
    return options_.scale_type == DType::bf16 ? bf16_to_f32(f32_to_bf16(scale)) : scale;
  }

  Quantised quantise(const Unit& unit) const {
    const int64_t rows = unit.rows, columns = unit.columns;
    const DType type = unit.entry->dtype;
    const int64_t row_bytes = columns * info_of(type).block_bytes;
    const uint8_t* base = unit.entry->data.data() + unit.offset * info_of(type).block_bytes;
    const int64_t block_rows = blocks() ? scale_blocks(rows) : 1,
                  block_columns = blocks() ? scale_blocks(columns) : 1;
    const int64_t width = blocks() ? kBlock : columns;  // of a block
    std::vector<float> scales(static_cast<size_t>(block_rows * block_columns));
    const int64_t bands = scale_blocks(rows);  // of 128 rows, the unit of work
    /// body(band, values, row) for every row, in fp32; bands in parallel.
    const auto each_row = [&](auto&& body) {
      cpu::parallel_for(stream_.threads, bands, [&](int64_t band, int) {
        std::vector<float> values(static_cast<size_t>(columns));
        for (int64_t row = band * kBlock; row < std::min(rows, (band + 1) * kBlock); ++row) {
          dequantize_row(type, base + row * row_bytes, columns, values.data());
          body(band, values, row);
        }
      });
    };
    std::vector<float> largest(static_cast<size_t>(bands * block_columns), 0.f);
    each_row([&](int64_t band, const std::vector<float>& values, int64_t) {
      for (int64_t c = 0; c < columns; ++c) {
        float& max = largest[band * block_columns + c / width];
        max = std::max(max, std::abs(values[c]));
      }
    });
    if (blocks()) {
      for (size_t i = 0; i < scales.size(); ++i) scales[i] = stored_scale(made_scale(largest[i]));
    } else {
      scales[0] = stored_scale(made_scale(*std::max_element(largest.begin(), largest.end())));
    }

    Quantised q;
    q.values.resize(static_cast<size_t>(rows * columns));
    std::vector<Loss> losses(static_cast<size_t>(bands));
    each_row([&](int64_t band, const std::vector<float>& values, int64_t row) {
      const float* of_band = scales.data() + (blocks() ? band * block_columns : 0);
      uint8_t* to = q.values.data() + row * columns;
      Loss loss;
      for (int64_t c = 0; c < columns; ++c) {
        const float scale = of_band[c / width];
        to[c] = f32_to_fp8(values[c] / scale);
        loss.add(values[c], fp8_to_f32(to[c]) * scale);
      }
      losses[band].add(loss);
    });
    for (const Loss& loss : losses) q.loss.add(loss);
    q.scales.resize(scales.size() * static_cast<size_t>(info_of(options_.scale_type).block_bytes));
    for (size_t i = 0; i < scales.size(); ++i) {
      store(options_.scale_type, q.scales.data(), static_cast<int64_t>(i), scales[i]);
    }
    return q;
  }

  const Source& source_;
  const std::string& out_;
  const QuantizeOptions& options_;
  const Stream& stream_;
  std::vector<Unit> units_;
  QuantizeResult result_;
  int64_t done_ = 0;
};

/// Whether a folder with these weights needs the file too: for the tokenizer, chat or generation, or as licence and model
/// card. A source folder may hold anything else.
bool belongs_to_a_model(std::string_view name) {
  constexpr std::string_view kNames[] = {
      "generation_config.json",  "vocab.json",       "vocab.txt", "merges.txt",
      "special_tokens_map.json", "added_tokens.json"};
  // With any words behind, as data or text: tokenizer_config.json, LICENSE.txt, README.md; never code or weights.
  constexpr std::string_view kBeginnings[] = {"tokenizer", "chat_template", "LICENSE",
                                              "LICENCE",   "NOTICE",        "README"};
  constexpr std::string_view kEndings[] = {"", ".json", ".txt", ".md", ".model", ".jinja", ".tiktoken"};
  const std::string_view ending = name.substr(std::min(name.find('.'), name.size()));
  return std::ranges::find(kNames, name) != std::end(kNames) || name.ends_with(".tiktoken") ||
         (std::ranges::find(kEndings, ending) != std::end(kEndings) &&
          std::ranges::any_of(kBeginnings, [&](std::string_view begin) { return name.starts_with(begin); }));
}

Status copy_other_files(const std::string& from, const std::string& to, std::vector<std::string>& written) {
  std::error_code failure;
  fs::directory_iterator file(from, failure);
  for (; !failure && file != fs::directory_iterator(); file.increment(failure)) {
    const std::string name = file->path().filename().string();
    std::error_code of_file;  // a link to nowhere is no file, and no reason to stop
    if (!belongs_to_a_model(name) || !file->is_regular_file(of_file)) continue;
    written.push_back(to + "/" + name);
    fs::copy_file(file->path(), written.back(), of_file);
    if (of_file) return io_error("{}: cannot be copied from {}: {}", written.back(), from, of_file.message());
  }
  if (failure) return io_error("{}: cannot be listed: {}", from, failure.message());
  return {};
}

Status check_options(const Source& source, const QuantizeOptions& options) {
  if (options.format != WeightFormat::fp8_static && options.format != WeightFormat::fp8_block128) {
    return invalid_argument("format is {}, needs fp8 per tensor or in blocks of 128",
                            name_of(options.format));
  }
  if (options.scale_type != DType::f32 && options.scale_type != DType::bf16) {
    return invalid_argument("scale_type is {}, needs f32 or bf16", name_of(options.scale_type));
  }
  if (!std::isfinite(options.margin) || options.margin < 1) {
    return invalid_argument("margin is {}, needs a finite number >= 1", options.margin);
  }
  if (options.calibration == nullptr) {
    if (options.format == WeightFormat::fp8_block128) return {};
    return invalid_argument(
        "static scales per tensor need a calibration: give a text that is like what the model will read");
  }
  if (std::ssize(options.calibration->layers) != source.config.layers) {
    return invalid_argument("calibration has {} layers, the model has {}", options.calibration->layers.size(),
                            source.config.layers);
  }
  return {};
}

/// Whether the files of `model` are such that they can be quantised.
Status check_model_path(const std::string& model) {
  std::error_code failure;
  if (is_synthetic(model))
    return unsupported("{}: a synthetic model has no files; use its dtype= option", model);
  if (!fs::exists(model, failure)) return not_found("{}: there is no such folder", model);
  if (fs::is_directory(model, failure)) return {};
  VIVACE_TRY(check_whole_model(model));
  return unsupported("{}: quantize reads a folder with config.json and safetensors, not a single (GGUF) file",
                     model);
}

/// The configuration until all else is written: whoever made it owns the folder, and has it locked while it writes.
std::string claim_of(const std::string& out) {
  return out + "/config.json.part";
}

/// The folder is another run's, which writes now or was killed.
Status claimed(const std::string& out) {
  const int file = ::open(claim_of(out).c_str(), O_RDONLY | O_CLOEXEC);
  const bool writes = file >= 0 && ::flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (file >= 0) ::close(file);
  if (writes) return invalid_argument("{}: another quantize writes here now; take another folder", out);
  return invalid_argument(
      "{}: has the files of a quantize that was killed; remove the folder or take another", out);
}

/// A new folder that can be made, or an empty one.
Status check_out_path(const std::string& out) {
  if (out.empty()) return invalid_argument("the folder to write is '', needs a path");
  std::error_code failure;
  if (!fs::exists(out, failure)) {
    const bool made = fs::create_directories(out, failure);
    if (failure) return io_error("{}: cannot be made: {}", out, failure.message());
    if (made) fs::remove(out, failure);
    return {};
  }
  if (!fs::is_directory(out, failure)) return invalid_argument("{}: exists and is not a folder", out);
  if (fs::exists(claim_of(out), failure)) return claimed(out);
  if (!fs::is_empty(out, failure) || failure) {
    return invalid_argument("{}: the folder is not empty, needs a new or an empty one", out);
  }
  return {};
}

/// The folder for this run alone.
class Claim {
 public:
  Claim() = default;
  ~Claim() {
    if (file_ >= 0) ::close(file_);
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  Status take(const std::string& out) {
    file_ = ::open(claim_of(out).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file_ < 0 && errno == EEXIST) return claimed(out);
    if (file_ < 0) return io_error("{}: cannot be written: {}", claim_of(out), std::strerror(errno));
    (void)::flock(file_, LOCK_EX);  // where there are no locks the folder is refused all the same
    return {};
  }

 private:
  int file_ = -1;
};

Result<QuantizeResult> quantize_source(const std::string& model, const std::string& out,
                                       const QuantizeOptions& options, const Stream& stream) {
  VIVACE_TRY(check_quantize_paths(model, out));
  VIVACE_TRY_ASSIGN(const Source source, open_source(model));
  VIVACE_TRY(check_options(source, options));
  {
    // What the result could not be loaded for is found before it is written.
    VIVACE_TRY_ASSIGN(const auto checkpoint, open_hf_folder(model));
    VIVACE_TRY(bind_weights(*checkpoint, RouterMode::exact).status());
  }
  Quantiser quantiser(source, out, options, stream);
  VIVACE_TRY(quantiser.plan());
  std::error_code failure;
  const bool made = fs::create_directories(out, failure);
  if (failure) return io_error("{}: cannot be made: {}", out, failure.message());
  Claim claim;
  VIVACE_TRY(claim.take(out));
  std::vector<std::string> written{claim_of(out)};
  const auto write_all = [&]() -> Status {
    VIVACE_TRY(quantiser.write(written));
    VIVACE_TRY(copy_other_files(model, out, written));
    VIVACE_TRY(quantiser.check_stop());
    VIVACE_TRY(Quantiser::write_text(claim_of(out), quantiser.config()));
    fs::rename(claim_of(out), out + "/config.json", failure);
    if (failure) return io_error("{}/config.json: cannot be written: {}", out, failure.message());
    return {};
  };
  if (const Status status = guarded("quantize", write_all); !status.ok()) {
    std::error_code ignored;
    for (; !written.empty(); written.pop_back()) fs::remove(written.back(), ignored);  // the claim last
    if (made) fs::remove(out, ignored);
    return status;
  }
  return quantiser.take();
}

}  // namespace

Status check_quantize_paths(const std::string& model, const std::string& out) {
  VIVACE_TRY(check_model_path(model));
  return check_out_path(out);
}

double QuantizedGroup::relative_error() const {
  return squares > 0 ? std::sqrt(error_squares / squares) : 0;
}

double QuantizedGroup::lost_share() const {
  return weights > 0 ? static_cast<double>(lost) / static_cast<double>(weights) : 0;
}

Result<QuantizeResult> quantize_folder(const std::string& model, const std::string& out,
                                       const QuantizeOptions& options, const Stream& stream) {
  return guarded("quantize", [&] { return quantize_source(model, out, options, stream); });
}

}  // namespace vivace::model
