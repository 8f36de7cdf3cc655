#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "src/bench/target.h"
#include "vivace/status.h"

// What the load generator writes to and reads from servers with OpenAI's protocol: text only, no connections.

namespace vivace::bench::openai {

/// "/v1/chat/completions" for messages, "/v1/completions" for the rest.
std::string_view path_of(const Prompt& prompt);

/// The body of a streaming request. Usage is asked for. A seed is sent with a temperature alone.
std::string body_of(const LoadRequest& request, const std::string& model);

/// What one event of a stream says.
struct Chunk {
  bool counted = false;   ///< a chunk that TTFT and ITL count
  bool finished = false;  ///< it had a finish_reason
  std::string text;
  std::string error;  ///< the server's message when it gave up in the middle
  int64_t prompt_tokens = -1, completion_tokens = -1, cached_tokens = 0;  ///< -1: it has no usage
};

/// Counted is every chunk with a choice, whatever its text: a token may complete no character. Not counted: a chat's
/// first delta that has a role and no text, which says nothing about a token, and a delta without content.
/// invalid_argument: `data` is not such an object; the message has its beginning.
Result<Chunk> read_chunk(std::string_view data);

/// The message of an error's body: that of OpenAI's shape, else the beginning of the body on one line.
std::string error_message(std::string_view body);

struct ServedModel {
  std::string id;
  int64_t max_model_len = 0;  ///< 0: the server does not say
};
/// The model of a /v1/models body called `name`, or its first when `name` is empty. not_found lists those there are.
Result<ServedModel> read_models(std::string_view body, const std::string& name);

}  // namespace vivace::bench::openai
