#pragma once

#include <algorithm>
#include <sstream>

#include "src/model/quantize.h"
#include "src/model/score.h"
#include "src/model/tokenizer.h"
#include "tests/model/altered_checkpoint.h"

// The tiny models' text and their FP8 copies, for comparisons of perplexity.

namespace vivace::testing {

/// The ids of a tiny model's text: of the one with a tokenizer its sample; of the other what its references hold.
inline std::vector<int32_t> text_of(const std::string& path) {
  const auto checkpoint = open_checkpoint(path);
  std::vector<int32_t> ids;
  if (!checkpoint->tokenizer().present()) {
    const nlohmann::json references = read_json(path + "/references.json");
    for (auto c = references.at("cases").rbegin(); c != references.at("cases").rend();
         ++c) {  // the longest first
      for (const char* part : {"prompt_ids", "greedy_ids"}) {
        const auto more = c->at(part).get<std::vector<int32_t>>();
        ids.insert(ids.end(), more.begin(), more.end());
      }
    }
    return ids;
  }
  std::ifstream file(path + "/sample.txt", std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  const auto tokenizer = model::Tokenizer::create(checkpoint->tokenizer());
  return *model::score_ids(**tokenizer, text.str(), 0);
}

/// FP8 copies of a model in a temporary folder, calibrated on the CPU with `ids` in windows of 256.
class QuantisedCopies {
 public:
  QuantisedCopies(const std::string& source, std::span<const int32_t> ids) : source_(source), threads_(2) {
    auto calibration = model::calibrate(*open_checkpoint(source), ids, {.window = 256}, stream());
    EXPECT_TRUE(calibration.ok()) << calibration.status().message();
    if (calibration.ok()) calibration_ = std::move(*calibration);
  }
  /// The folder of that format; the source itself for plain.
  std::string path(model::WeightFormat format) {
    if (format == model::WeightFormat::plain) return source_;
    const std::string path = folder_.file("format" + std::to_string(static_cast<int>(format)));
    if (std::filesystem::exists(path)) return path;
    const auto written =
        model::quantize_folder(source_, path, {.format = format, .calibration = &calibration_}, stream());
    EXPECT_TRUE(written.ok()) << written.status().message();
    return path;
  }

 private:
  Stream stream() { return {.threads = &threads_}; }

  std::string source_;
  TempFolder folder_;
  cpu::ThreadPool threads_;
  model::Calibration calibration_;
};

}  // namespace vivace::testing
