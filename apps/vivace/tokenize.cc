#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "apps/vivace/commands.h"
#include "apps/vivace/model_files.h"
#include "apps/vivace/output.h"

namespace vivace::cli {

namespace {

Status tokenize(const TokenizeArgs& args) {
  VIVACE_TRY_ASSIGN(const ModelFiles files, open_model_files(args.model));
  VIVACE_TRY(need_tokenizer(files, args.model,
                            files.checkpoint->synthetic()
                                ? "random weights come without one; tokenize needs a model from files"
                                : "tokenize needs tokenizer.json beside config.json, or a GGUF file"));
  const model::Tokenizer& tokenizer = *files.tokenizer;
  const auto special = args.parse_special ? model::SpecialTokens::parse : model::SpecialTokens::as_text;
  VIVACE_TRY_ASSIGN(const std::vector<int32_t> ids, tokenizer.encode(args.text, special));
  const std::string text = tokenizer.decode(ids);
  if (args.json) {
    print_json({{"ids", ids}, {"text", text}});
    return {};
  }
  std::string out;
  for (const int32_t id : ids) {
    out += fmt::format("{:>8}  {}{}\n", id, visible(tokenizer.bytes_of(id)),
                       tokenizer.is_special(id) ? "  (control)" : "");
  }
  write_out(out);
  note(fmt::format("{} token{}", ids.size(), ids.size() == 1 ? "" : "s"));
  return {};
}

}  // namespace

int run(const TokenizeArgs& args) {
  const Status status = tokenize(args);
  return status.ok() ? 0 : fail(status);
}

}  // namespace vivace::cli
