#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "src/bench/random.h"
#include "src/bench/workload.h"
#include "src/core/error.h"
#include "src/model/json.h"

namespace vivace::bench {

namespace {

using nlohmann::json;

constexpr int64_t kMostTokens = 1 << 20;
constexpr size_t kMostLineBytes = size_t{16} << 20;
constexpr size_t kMostBytes = size_t{1} << 30;

Status read_ids(const std::string& place, const json& list, std::vector<int32_t>& ids) {
  for (const json& id : list) {
    const bool fits = id.is_number_unsigned() && id.get<uint64_t>() <= uint64_t{INT32_MAX};
    if (!fits) {
      return invalid_argument("{}: prompt[{}] is {}, needs a token id from 0 to {}", place, ids.size(),
                              model::excerpt(id), INT32_MAX);
    }
    ids.push_back(id.get<int32_t>());
  }
  return {};
}

Status check_messages(const std::string& place, const json& messages) {
  if (!messages.is_array() || messages.empty()) {
    return invalid_argument("{}: messages is {}, needs a list of {{\"role\": ..., \"content\": ...}}", place,
                            model::excerpt(messages));
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    for (const char* field : {"role", "content"}) {
      const json& message = messages[i];
      const auto it = message.is_object() ? message.find(field) : message.end();
      const bool parts = it != message.end() && it->is_array() && std::string_view(field) == "content";
      if (it == message.end() || !(it->is_string() || parts)) {
        return invalid_argument("{}: messages[{}].{} is {}, needs a text", place, i, field,
                                it == message.end() ? "absent" : model::excerpt(*it));
      }
    }
  }
  return {};
}

Result<PlannedRequest> read_line(const std::string& place, std::string_view line,
                                 const DatasetOptions& options) {
  VIVACE_TRY_ASSIGN(const json object, model::parse_json_object(place, line));
  model::JsonFields fields(place, object);
  PlannedRequest request;
  request.output_tokens = fields.integer("max_tokens", 1, kMostTokens, options.default_tokens);
  VIVACE_TRY(fields.status());
  const json* prompt = fields.find("prompt");
  const json* messages = fields.find("messages");
  if ((prompt == nullptr) == (messages == nullptr)) {
    return invalid_argument("{}: needs one of prompt and messages, has {}", place,
                            prompt == nullptr ? "neither" : "both");
  }
  if (messages != nullptr) {
    VIVACE_TRY(check_messages(place, *messages));
    request.prompt.messages = messages->dump();
  } else if (prompt->is_string() && !prompt->get_ref<const std::string&>().empty()) {
    request.prompt.text = prompt->get<std::string>();
    if (options.chat) request.prompt = user_message(request.prompt.text);
  } else if (prompt->is_array() && !prompt->empty() && !options.chat) {
    VIVACE_TRY(read_ids(place, *prompt, request.prompt.ids));
  } else {
    return invalid_argument("{}: prompt is {}, needs a text that is not empty{}", place,
                            model::excerpt(*prompt),
                            options.chat ? " for a chat" : ", or a list of token ids");
  }
  return request;
}

}  // namespace

Result<std::vector<PlannedRequest>> plan_dataset(const DatasetOptions& options) {
  std::ifstream file(options.path, std::ios::binary);
  if (!file) return io_error("{}: cannot be read", options.path);
  std::vector<PlannedRequest> lines;
  std::string line;
  size_t bytes = 0;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    const std::string place = fmt::format("{}:{}", options.path, number);
    bytes += line.size();
    if (line.size() > kMostLineBytes || bytes > kMostBytes) {
      return invalid_argument("{}: {} bytes, needs at most {} in a line and {} in a file", place, bytes,
                              kMostLineBytes, kMostBytes);
    }
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    VIVACE_TRY_ASSIGN(PlannedRequest request, read_line(place, line, options));
    lines.push_back(std::move(request));
  }
  if (file.bad()) return io_error("{}: cannot be read", options.path);
  if (lines.empty())
    return invalid_argument("{}: has no request, needs a line of JSON for each", options.path);

  const int64_t count = static_cast<int64_t>(lines.size());
  Random random(options.seed);
  Arrivals arrivals(options.rate);
  std::vector<PlannedRequest> plan;
  for (int64_t i = 0; i < (options.requests > 0 ? options.requests : count); ++i) {
    PlannedRequest request = lines[static_cast<size_t>((options.first + i) % count)];
    request.seed = sampling_seed(random);
    request.arrival_s = arrivals.next(random);
    plan.push_back(std::move(request));
  }
  return plan;
}

}  // namespace vivace::bench
