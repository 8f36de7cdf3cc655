#pragma once

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "src/server/model.h"

namespace vivace::fuzz {

template <class T>
T value_or_abort(Result<T> result) {
  if (result.ok()) return std::move(result).value();
  std::fprintf(stderr, "%s\n", result.status().message().c_str());
  std::abort();
}

/// A real tokenizer and chat template, from the data of the tests.
inline server::ServedModel served_model() {
  const auto read = [](const std::string& name) {
    std::ifstream file(std::string(VIVACE_TEST_DATA "/") + name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  server::ServedModel model;
  model.name = model.path = "m";
  model::TokenizerSource source;
  source.tokenizer_json = read("tiny-qwen3-moe/tokenizer.json");
  model.tokenizer = value_or_abort(model::Tokenizer::create(source));
  model.chat_template = value_or_abort(model::ChatTemplate::compile(read("chat_templates/smollm2.jinja")));
  model.bytes_of = [tokenizer = model.tokenizer](int32_t id) { return tokenizer->bytes_of(id); };
  return model;
}

}  // namespace vivace::fuzz
