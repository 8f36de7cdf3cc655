#include "src/model/tokenizer_definition.h"

#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>

#include "src/core/error.h"
#include "src/model/json.h"
#include "src/model/utf8.h"

namespace vivace::model {
namespace {

using nlohmann::json;

// The patterns below are constants of the published tokenizers; GGUF names them by the value of
// tokenizer.ggml.pre.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kSingleDigit = R"(\p{N})";

struct GgufPreTokenizer {
  std::string_view name;
  std::vector<std::string_view> steps;
  bool nfc, ignore_merges;
};

const std::vector<GgufPreTokenizer>& gguf_pre_tokenizers() {
  static const std::vector<GgufPreTokenizer> known = {
      {"smollm", {kSingleDigit, kGpt2Pattern}, false, false},
      {"qwen2", {kQwen2Pattern}, true, false},
      {"llama-bpe", {kLlama3Pattern}, false, true},
      {"llama3", {kLlama3Pattern}, false, true},
      {"gpt-2", {kGpt2Pattern}, false, false},
      {"default", {kGpt2Pattern}, false, false},  // files from before the key existed
  };
  return known;
}

// Token strings spell each byte as one printable character: those of Latin-1 that are visible stand for
// themselves, the other 68 bytes are, in order, U+0100 and up.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    byte_of_.fill(-1);
    int next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool visible = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      byte_of_[visible ? byte : next++] = byte;
    }
  }

  // A string with a character outside the alphabet stands for its own UTF-8 bytes.
  std::string bytes_of(std::string_view spelled) const {
    std::string bytes;
    for (size_t i = 0; i < spelled.size();) {
      const Utf8Step step = utf8_step(spelled, i);
      if (step.kind != Utf8Step::character || step.value >= byte_of_.size() || byte_of_[step.value] < 0) {
        return std::string(spelled);
      }
      bytes += static_cast<char>(byte_of_[step.value]);
      i += step.length;
    }
    return bytes;
  }

  // The byte that a one-character string spells, or -1.
  int byte_of(std::string_view spelled) const {
    if (spelled.empty()) return -1;
    const Utf8Step step = utf8_step(spelled, 0);
    if (step.kind != Utf8Step::character || static_cast<size_t>(step.length) != spelled.size()) return -1;
    return step.value < byte_of_.size() ? byte_of_[step.value] : -1;
  }

 private:
  std::array<int, 324> byte_of_;
};

using Vocab = std::unordered_map<std::string_view, int32_t>;  // by spelling

// What both sources do with their vocabulary, once `definition.kinds` says which ids are control tokens.
Status finish(TokenizerDefinition& definition, const Vocab& vocab,
              const std::vector<std::pair<std::string_view, std::string_view>>& merges,
              std::string_view place) {
  const ByteAlphabet alphabet;
  definition.byte_ids.fill(-1);
  for (const auto& [spelled, id] : vocab) {
    if (definition.kinds[id] != TokenKind::normal) continue;
    definition.bytes[id] = alphabet.bytes_of(spelled);
    if (const int byte = alphabet.byte_of(spelled); byte >= 0) definition.byte_ids[byte] = id;
  }
  definition.merges.reserve(merges.size());
  std::string merged;
  for (size_t i = 0; i < merges.size(); ++i) {
    const auto& [left, right] = merges[i];
    merged = left;
    merged += right;
    auto find = [&](std::string_view text) {
      const auto found = vocab.find(text);
      return found == vocab.end() ? -1 : found->second;
    };
    const Bpe::Merge merge{find(left), find(right), find(merged)};
    if (merge.left < 0 || merge.right < 0 || merge.merged < 0) {
      return invalid_argument("{}: merge {} joins '{}' and '{}', but '{}' is not in the vocabulary", place, i,
                              left, right,
                              merge.left < 0    ? left
                              : merge.right < 0 ? right
                                                : std::string_view(merged));
    }
    // Ordinary text must not become a control token, not even through a rule that spells one. Its rank stays
    // taken.
    definition.merges.push_back(definition.kinds[merge.merged] == TokenKind::control ? Bpe::Merge{-1, -1, -1}
                                                                                     : merge);
  }
  if (definition.unknown_id >= 0 && definition.kinds[definition.unknown_id] == TokenKind::control) {
    definition.unknown_id = -1;
  }
  return {};
}

Status check_added(const TokenizerDefinition::Added& added, std::string_view place) {
  if (added.content.empty() || added.content.size() > kMaxAddedTokenBytes) {
    return invalid_argument("{}: added token {} has {} bytes, needs 1 to {}", place, added.id,
                            added.content.size(), kMaxAddedTokenBytes);
  }
  return {};
}

// --- tokenizer.json
// -------------------------------------------------------------------------------------------------

constexpr std::string_view kFile = "tokenizer.json";

std::string shown(const json& value) {
  if (value.is_structured()) return fmt::format("an {} of {}", value.type_name(), value.size());
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 80) {
    size_t end = 77;  // not inside a character
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
    text = text.substr(0, end) + "...";
  }
  return text;
}

const json& field(const json& object, const char* name) {
  static const json null;
  const auto found = object.find(name);
  return found == object.end() ? null : *found;
}

Result<bool> flag(const json& object, const char* name, bool otherwise, std::string_view place) {
  const json& value = field(object, name);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean())
    return invalid_argument("{}: {}.{} is {}, needs true or false", kFile, place, name, shown(value));
  return value.get<bool>();
}

Result<std::string> type_of(const json& object, std::string_view place) {
  if (!object.is_object())
    return invalid_argument("{}: {} is {}, needs an object", kFile, place, shown(object));
  const json& type = field(object, "type");
  if (!type.is_string())
    return invalid_argument("{}: {}.type is {}, needs a string", kFile, place, shown(type));
  return type.get<std::string>();
}

// `node` itself, or the parts of a Sequence; sequences inside sequences count as one flat list.
Status flatten(const json& node, const char* place, const char* list, std::vector<const json*>& parts) {
  std::vector<const json*> open = {&node};
  while (!open.empty()) {
    const json& part = *open.back();
    open.pop_back();
    if (part.is_null()) continue;
    VIVACE_TRY_ASSIGN(const std::string type, type_of(part, place));
    if (type != "Sequence") {
      parts.push_back(&part);
      continue;
    }
    const json& inner = field(part, list);
    if (!inner.is_array())
      return invalid_argument("{}: {}.{} is {}, needs an array", kFile, place, list, shown(inner));
    for (auto it = inner.rbegin(); it != inner.rend(); ++it) open.push_back(&*it);
  }
  return {};
}

Status read_normalizer(const json& node, TokenizerDefinition& definition) {
  std::vector<const json*> parts;
  VIVACE_TRY(flatten(node, "normalizer", "normalizers", parts));
  for (const json* part : parts) {
    VIVACE_TRY_ASSIGN(const std::string type, type_of(*part, "normalizer"));
    if (type != "NFC")
      return unsupported("{}: normalizer.type is '{}', supported are NFC and Sequence", kFile, type);
    definition.nfc = true;
  }
  return {};
}

Status read_split(const json& part, PreTokenizer& pre_tokenizer) {
  const json& behavior = field(part, "behavior");
  if (behavior != "Isolated") {
    return unsupported("{}: pre_tokenizer.behavior is {}, supported is \"Isolated\"", kFile, shown(behavior));
  }
  VIVACE_TRY_ASSIGN(const bool invert, flag(part, "invert", false, "pre_tokenizer"));
  if (invert) return unsupported("{}: pre_tokenizer.invert is true, supported is false", kFile);
  const json& pattern = field(part, "pattern");
  if (pattern.is_object() && field(pattern, "Regex").is_string()) {
    return pre_tokenizer.add_step(field(pattern, "Regex").get_ref<const std::string&>());
  }
  if (pattern.is_object() && field(pattern, "String").is_string()) {
    return pre_tokenizer.add_step(
        PreTokenizer::literal(field(pattern, "String").get_ref<const std::string&>()));
  }
  return invalid_argument("{}: pre_tokenizer.pattern is {}, needs {{\"Regex\": ..}} or {{\"String\": ..}}",
                          kFile, shown(pattern));
}

Status read_pre_tokenizer(const json& node, TokenizerDefinition& definition) {
  std::vector<const json*> parts;
  VIVACE_TRY(flatten(node, "pre_tokenizer", "pretokenizers", parts));
  bool byte_level = false;
  for (const json* part : parts) {
    VIVACE_TRY_ASSIGN(const std::string type, type_of(*part, "pre_tokenizer"));
    if (byte_level)
      return unsupported("{}: pre_tokenizer has '{}' after ByteLevel, which must be last", kFile, type);
    if (type == "ByteLevel") {
      VIVACE_TRY_ASSIGN(const bool prefix, flag(*part, "add_prefix_space", true, "pre_tokenizer"));
      if (prefix) return unsupported("{}: pre_tokenizer.add_prefix_space is true, supported is false", kFile);
      VIVACE_TRY_ASSIGN(const bool use_regex, flag(*part, "use_regex", true, "pre_tokenizer"));
      if (use_regex) VIVACE_TRY(definition.pre_tokenizer.add_step(kGpt2Pattern));
      byte_level = true;
    } else if (type == "Split") {
      VIVACE_TRY(read_split(*part, definition.pre_tokenizer));
    } else if (type == "Digits") {
      VIVACE_TRY_ASSIGN(const bool individual, flag(*part, "individual_digits", false, "pre_tokenizer"));
      VIVACE_TRY(
          definition.pre_tokenizer.add_step(individual ? kSingleDigit : std::string_view(R"(\p{N}+)")));
    } else {
      return unsupported(
          "{}: pre_tokenizer.type is '{}', supported are ByteLevel, Split, Digits and Sequence", kFile, type);
    }
  }
  if (!byte_level)
    return unsupported("{}: pre_tokenizer has no ByteLevel, so this is not a byte-level BPE", kFile);
  return {};
}

// Only a token in front of the text matters here: callers add it when add_bos() says so.
Status read_post_processor(const json& node, TokenizerDefinition& definition) {
  std::vector<const json*> parts;
  VIVACE_TRY(flatten(node, "post_processor", "processors", parts));
  for (const json* part : parts) {
    VIVACE_TRY_ASSIGN(const std::string type, type_of(*part, "post_processor"));
    if (type == "ByteLevel") continue;
    if (type != "TemplateProcessing") {
      return unsupported(
          "{}: post_processor.type is '{}', supported are TemplateProcessing, ByteLevel and Sequence", kFile,
          type);
    }
    const json& single = field(*part, "single");
    if (!single.is_array()) {
      return invalid_argument("{}: post_processor.single is {}, needs an array", kFile, shown(single));
    }
    if (single.empty() || !single[0].is_object()) continue;
    const json& special = field(single[0], "SpecialToken");
    if (!special.is_object()) continue;
    const json& name = field(special, "id");
    if (!name.is_string()) {
      return invalid_argument("{}: post_processor.single[0].SpecialToken.id is {}, needs a string", kFile,
                              shown(name));
    }
    for (const auto& added : definition.added) {
      if (added.content == name.get_ref<const std::string&>()) {
        definition.bos_id = added.id;
        definition.add_bos = true;
      }
    }
    if (!definition.add_bos) {
      return invalid_argument("{}: post_processor puts {} first, which is not an added token", kFile,
                              shown(name));
    }
  }
  return {};
}

Status refuse_unless_empty(const json& model, const char* name) {
  const json& value = field(model, name);
  if (value.is_null() || value == "" || value == 0.0 || value == false) return {};
  return unsupported("{}: model.{} is {}, supported is null", kFile, name, shown(value));
}

// Ids are untrusted, and tables are indexed by them: a file may leave out some ids, but not most.
Result<int32_t> read_id(const json& value, size_t entries, std::string_view token) {
  const int64_t limit = 2 * static_cast<int64_t>(entries) + 4096;
  if (!value.is_number_integer() || value.get<int64_t>() < 0 || value.get<int64_t>() >= limit) {
    return invalid_argument("{}: token '{}' has id {}, needs an integer in [0, {})", kFile,
                            token.substr(0, 80), shown(value), limit);
  }
  return static_cast<int32_t>(value.get<int64_t>());
}

Status read_added_tokens(const json& list, size_t entries, TokenizerDefinition& definition) {
  if (list.is_null()) return {};
  if (!list.is_array()) return invalid_argument("{}: added_tokens is {}, needs an array", kFile, shown(list));
  for (const json& item : list) {
    if (!item.is_object() || !field(item, "content").is_string()) {
      return invalid_argument("{}: added_tokens has {}, needs an object with a content", kFile, shown(item));
    }
    const std::string& content = field(item, "content").get_ref<const std::string&>();
    const std::string place = fmt::format("added token '{}'", content.substr(0, 80));
    VIVACE_TRY_ASSIGN(const int32_t id, read_id(field(item, "id"), entries, content));
    VIVACE_TRY_ASSIGN(const bool control, flag(item, "special", false, place));
    VIVACE_TRY_ASSIGN(const bool normalized, flag(item, "normalized", !control, place));
    for (const char* name : {"single_word", "lstrip", "rstrip"}) {
      VIVACE_TRY_ASSIGN(const bool set, flag(item, name, false, place));
      if (set) return unsupported("{}: {} has {} = true, supported is false", kFile, place, name);
    }
    definition.added.push_back({content, id, control, normalized});
    VIVACE_TRY(check_added(definition.added.back(), kFile));
  }
  return {};
}

Status read_merges(const json& list, std::vector<std::pair<std::string_view, std::string_view>>& merges) {
  if (!list.is_array()) return invalid_argument("{}: model.merges is {}, needs an array", kFile, shown(list));
  merges.reserve(list.size());
  for (const json& item : list) {
    if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
      merges.emplace_back(item[0].get_ref<const std::string&>(), item[1].get_ref<const std::string&>());
      continue;
    }
    const std::string_view text = item.is_string() ? item.get_ref<const std::string&>() : std::string_view();
    const size_t space = text.find(' ');
    if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
      return invalid_argument("{}: model.merges has {}, needs \"left right\" or [\"left\", \"right\"]", kFile,
                              shown(item));
    }
    merges.emplace_back(text.substr(0, space), text.substr(space + 1));
  }
  return {};
}

Result<TokenizerDefinition> read_json_definition(const json& root, const TokenizerSource& source) {
  const json& model = field(root, "model");
  if (!model.is_object()) return invalid_argument("{}: model is {}, needs an object", kFile, shown(model));
  // Old files have no model.type; only BPE has merges.
  const json& type = field(model, "type");
  if (type != "BPE" && !(type.is_null() && model.contains("merges"))) {
    return unsupported("{}: model.type is {}, supported is \"BPE\"", kFile, shown(type));
  }
  for (const char* name :
       {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"}) {
    VIVACE_TRY(refuse_unless_empty(model, name));
  }
  const json& vocab_json = field(model, "vocab");
  if (!vocab_json.is_object())
    return invalid_argument("{}: model.vocab is {}, needs an object", kFile, shown(vocab_json));

  TokenizerDefinition definition;
  const json& added_json = field(root, "added_tokens");
  const size_t entries = vocab_json.size() + (added_json.is_array() ? added_json.size() : 0);
  VIVACE_TRY(read_added_tokens(added_json, entries, definition));

  Vocab vocab;
  vocab.reserve(vocab_json.size());
  int32_t last_id = -1;
  for (auto it = vocab_json.begin(); it != vocab_json.end(); ++it) {
    VIVACE_TRY_ASSIGN(const int32_t id, read_id(it.value(), entries, it.key()));
    vocab.emplace(it.key(), id);
    last_id = std::max(last_id, id);
  }
  for (const auto& added : definition.added) last_id = std::max(last_id, added.id);
  definition.bytes.resize(last_id + 1);
  definition.kinds.assign(last_id + 1, TokenKind::none);
  for (const auto& [spelled, id] : vocab) {
    if (definition.kinds[id] != TokenKind::none) {
      return invalid_argument("{}: model.vocab has id {} twice, the second time for '{}'", kFile, id,
                              spelled.substr(0, 80));
    }
    definition.kinds[id] = TokenKind::normal;
  }
  for (const auto& added : definition.added) {
    const auto same = vocab.find(added.content);
    const bool taken = definition.kinds[added.id] != TokenKind::none;
    if (same == vocab.end() ? taken : same->second != added.id) {
      return invalid_argument(
          "{}: added token '{}' has id {}, but {}", kFile, added.content.substr(0, 80), added.id,
          same == vocab.end() ? "another token has it too" : "model.vocab gives the same text another id");
    }
    if (same != vocab.end() && definition.kinds[added.id] != TokenKind::normal) continue;  // listed twice
    definition.kinds[added.id] = added.control ? TokenKind::control : TokenKind::user;
    definition.bytes[added.id] = added.content;
  }

  const json& unknown = field(model, "unk_token");
  if (!unknown.is_null()) {
    const auto found = unknown.is_string() ? vocab.find(unknown.get_ref<const std::string&>()) : vocab.end();
    if (found != vocab.end()) definition.unknown_id = found->second;
    if (found == vocab.end() && unknown != "") {
      return invalid_argument("{}: model.unk_token is {}, needs a token of model.vocab or null", kFile,
                              shown(unknown));
    }
  }
  VIVACE_TRY_ASSIGN(definition.ignore_merges, flag(model, "ignore_merges", false, "model"));
  std::vector<std::pair<std::string_view, std::string_view>> merges;
  VIVACE_TRY(read_merges(field(model, "merges"), merges));
  VIVACE_TRY(finish(definition, vocab, merges, kFile));

  VIVACE_TRY(read_normalizer(field(root, "normalizer"), definition));
  VIVACE_TRY(read_pre_tokenizer(field(root, "pre_tokenizer"), definition));
  VIVACE_TRY(read_post_processor(field(root, "post_processor"), definition));
  if (const json& decoder = field(root, "decoder"); !decoder.is_null()) {
    std::vector<const json*> parts;
    VIVACE_TRY(flatten(decoder, "decoder", "decoders", parts));
    for (const json* part : parts) {
      VIVACE_TRY_ASSIGN(const std::string decoder_type, type_of(*part, "decoder"));
      if (decoder_type != "ByteLevel") {
        return unsupported("{}: decoder.type is '{}', supported is ByteLevel", kFile, decoder_type);
      }
    }
  }
  if (definition.bos_id < 0) {
    definition.bos_id = source.bos_id;
    definition.add_bos = source.add_bos;
    for (const auto& added : definition.added) {
      if (definition.bos_id < 0 && added.content == source.bos_token) definition.bos_id = added.id;
    }
  }
  return definition;
}

// --- GGUF
// -----------------------------------------------------------------------------------------------------------

enum GgufTokenType : int32_t { kGgufUnknown = 2, kGgufControl = 3, kGgufUserDefined = 4 };

Result<TokenizerDefinition> read_gguf_definition(const TokenizerSource& source) {
  if (source.gguf_model != "gpt2") {
    return unsupported("tokenizer.ggml.model: is '{}', supported is 'gpt2' (byte-level BPE)",
                       source.gguf_model);
  }
  const GgufPreTokenizer* pre = nullptr;
  std::string names;
  for (const auto& known : gguf_pre_tokenizers()) {
    if (known.name == (source.gguf_pre.empty() ? "default" : source.gguf_pre)) pre = &known;
    names += names.empty() ? "" : ", ";
    names += known.name;
  }
  if (pre == nullptr) {
    return unsupported("tokenizer.ggml.pre: is '{}', supported are {}", source.gguf_pre, names);
  }
  const size_t count = source.tokens.size();
  if (!source.token_types.empty() && source.token_types.size() != count) {
    return invalid_argument("tokenizer.ggml.token_type: has {} entries, needs one per token ({})",
                            source.token_types.size(), count);
  }
  if (count > INT32_MAX)
    return invalid_argument("tokenizer.ggml.tokens: has {} entries, ids have 31 bits", count);

  TokenizerDefinition definition;
  definition.bytes.resize(count);
  definition.kinds.assign(count, TokenKind::normal);
  Vocab vocab;
  vocab.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const int32_t type = source.token_types.empty() ? 1 : source.token_types[i], id = static_cast<int32_t>(i);
    const std::string& text = source.tokens[i];
    const bool control = type == kGgufUnknown || type == kGgufControl;
    if (control || type == kGgufUserDefined) {
      definition.kinds[i] = control ? TokenKind::control : TokenKind::user;
      definition.bytes[i] = text;
      definition.added.push_back({text, id, control, false});
      VIVACE_TRY(check_added(definition.added.back(), "tokenizer.ggml.tokens"));
    }
    if (!vocab.emplace(text, id).second && !control && type != kGgufUserDefined) {
      return invalid_argument("tokenizer.ggml.tokens: '{}' is there twice, as {} and {}",
                              std::string_view(text).substr(0, 80), vocab[text], id);
    }
  }
  std::vector<std::pair<std::string_view, std::string_view>> merges;
  merges.reserve(source.merges.size());
  for (size_t i = 0; i < source.merges.size(); ++i) {
    const std::string_view text = source.merges[i];
    const size_t space = text.find(' ', 1);
    if (space == std::string_view::npos) {
      return invalid_argument("tokenizer.ggml.merges: entry {} is '{}', needs 'left right'", i,
                              text.substr(0, 80));
    }
    merges.emplace_back(text.substr(0, space), text.substr(space + 1));
  }
  auto optional_id = [&](const char* key, int32_t id) -> Status {
    if (id >= -1 && id < static_cast<int64_t>(count)) return {};
    return invalid_argument("tokenizer.ggml.{}: is {}, needs -1 or an id below {}", key, id, count);
  };
  VIVACE_TRY(optional_id("unknown_token_id", source.unk_id));
  definition.unknown_id = source.unk_id;
  definition.bos_id = source.bos_id;
  definition.add_bos = source.add_bos;
  definition.nfc = pre->nfc;
  definition.ignore_merges = pre->ignore_merges;
  for (std::string_view step : pre->steps) VIVACE_TRY(definition.pre_tokenizer.add_step(step));
  VIVACE_TRY(finish(definition, vocab, merges, "tokenizer.ggml.merges"));
  return definition;
}

}  // namespace

Result<TokenizerDefinition> read_tokenizer_definition(const TokenizerSource& source) {
  if (!source.present())
    return not_found("tokenizer: the model has neither a tokenizer.json nor tokenizer.ggml.tokens");
  TokenizerDefinition definition;
  if (source.tokenizer_json.empty()) {
    VIVACE_TRY_ASSIGN(definition, read_gguf_definition(source));
  } else {
    VIVACE_TRY_ASSIGN(const json root, parse_json_object(kFile, source.tokenizer_json));
    VIVACE_TRY_ASSIGN(definition, read_json_definition(root, source));
  }
  if (definition.bos_id < -1 || definition.bos_id >= static_cast<int64_t>(definition.bytes.size())) {
    return invalid_argument("tokenizer: bos_id is {}, needs -1 or an id below {}", definition.bos_id,
                            definition.bytes.size());
  }
  if (definition.bos_id < 0) definition.add_bos = false;
  return definition;
}

}  // namespace vivace::model
