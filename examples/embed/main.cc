// The engine in a program of one's own: several prompts at once, each told as its tokens come.
//
//   embed MODEL IDS [IDS...]     IDS is a prompt as token ids, such as 504,3686,282; `vivace tokenize` gives them

#include <iostream>
#include <sstream>

#include "vivace/engine.h"

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: embed MODEL IDS [IDS...]\n";
    return 2;
  }
  std::vector<std::string> texts(argc - 2);  // the engine thread writes them: they must outlive it
  const auto engine = vivace::Engine::create({.model = argv[1]});
  if (!engine.ok()) {
    std::cerr << engine.status().message() << "\n";
    return 1;
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    vivace::Request request;
    std::istringstream ids(argv[i + 2]);
    char comma = ',';
    for (int32_t id; comma == ',' && ids >> id; comma = 0, ids >> comma) request.prompt_ids.push_back(id);
    if (comma == ',' || !ids.eof()) {
      std::cerr << argv[i + 2] << ": needs token ids joined by commas, such as 504,3686,282\n";
      return 2;
    }
    request.sampling.temperature = 0;
    request.max_tokens = 32;
    const auto accepted =
        (*engine)->submit(std::move(request), [&text = texts[i]](const vivace::TokenEvent& event) {
          text += event.text;
          if (event.finish == vivace::FinishReason::error) text += " [" + event.error.message() + "]";
        });
    if (!accepted.ok()) {
      std::cerr << argv[i + 2] << ": " << accepted.status().message() << "\n";
      return 1;
    }
  }
  (*engine)->drain();
  for (const std::string& text : texts) std::cout << text << "\n";
}
