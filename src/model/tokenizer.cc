#include "src/model/tokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "src/core/error.h"
#include "src/model/bpe.h"
#include "src/model/pre_tokenizer.h"
#include "src/model/tokenizer_definition.h"
#include "src/model/utf8.h"

namespace vivace::model {
namespace {

// Finds added tokens: a trie over bytes, walked from each position, longest match first.
class AddedTokens {
 public:
  void add(const TokenizerDefinition::Added& token) {
    uint32_t node = 0;
    for (char c : token.content) {
      const auto byte = static_cast<unsigned char>(c);
      auto& children = nodes_[node].children;
      auto child =
          std::lower_bound(children.begin(), children.end(), std::pair<unsigned char, uint32_t>(byte, 0));
      if (child == children.end() || child->first != byte) {
        child = children.insert(child, {byte, static_cast<uint32_t>(nodes_.size())});
        node = child->second;
        nodes_.emplace_back();
      } else {
        node = child->second;
      }
    }
    nodes_[node].id = token.id;
    nodes_[node].control = token.control;
    starts_[static_cast<unsigned char>(token.content[0])] = true;
  }

  // Calls `on_text` for what lies between tokens (not empty) and `on_token` for tokens, in order. Control tokens are
  // looked for with `parse`, and then only where `marks` (unless empty) has no zero byte.
  template <class OnText, class OnToken>
  Status split(std::string_view text, SpecialTokens special, std::string_view marks, OnText on_text,
               OnToken on_token) const {
    size_t start = 0;
    for (size_t i = 0; i < text.size();) {
      const auto [id, length] =
          starts_[static_cast<unsigned char>(text[i])]
              ? longest(text.substr(i), special, marks.empty() ? marks : marks.substr(i))
              : std::pair<int32_t, size_t>(-1, 0);
      if (length == 0) {
        ++i;
        continue;
      }
      if (i > start) VIVACE_TRY(on_text(text.substr(start, i - start)));
      on_token(id);
      start = i += length;
    }
    return start < text.size() ? on_text(text.substr(start)) : Status();
  }

 private:
  struct Node {
    std::vector<std::pair<unsigned char, uint32_t>> children;  // by byte
    int32_t id = -1;
    bool control = false;
  };

  std::pair<int32_t, size_t> longest(std::string_view text, SpecialTokens special,
                                     std::string_view marks) const {
    bool marked = special == SpecialTokens::parse;
    std::pair<int32_t, size_t> best(-1, 0);
    uint32_t node = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      const auto& children = nodes_[node].children;
      const auto child =
          std::lower_bound(children.begin(), children.end(), std::pair<unsigned char, uint32_t>(byte, 0));
      if (child == children.end() || child->first != byte) break;
      node = child->second;
      marked = marked && (marks.empty() || marks[i] != 0);
      const bool allowed = marked || !nodes_[node].control;
      if (nodes_[node].id >= 0 && allowed) best = {nodes_[node].id, i + 1};
    }
    return best;
  }

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<bool, 256> starts_{};
};

// Unicode NFC of valid UTF-8. utf8proc's own reordering of combining marks is quadratic in a run of them,
// which a hostile text may make as long as it likes; so decomposition and reordering are done here, and it
// only composes.
Status compose(std::string_view text, std::string& out) {
  constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  const Status failed(Code::internal, "tokenizer: Unicode normalisation failed");
  std::vector<utf8proc_int32_t> points;
  points.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text, i);
    i += step.length;
    utf8proc_int32_t parts[32];
    int boundary = 0;
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.value), parts,
                                               std::size(parts), kOptions, &boundary);
    if (count < 0 || count > static_cast<utf8proc_ssize_t>(std::size(parts))) return failed;
    points.insert(points.end(), parts, parts + count);
  }
  auto combining_class = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  for (size_t begin = 0; begin < points.size();) {
    if (combining_class(points[begin]) == 0) {
      ++begin;
      continue;
    }
    size_t end = begin + 1;
    while (end < points.size() && combining_class(points[end]) != 0) ++end;
    std::stable_sort(points.begin() + begin, points.begin() + end,
                     [&](auto a, auto b) { return combining_class(a) < combining_class(b); });
    begin = end;
  }
  const auto length =
      utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()), kOptions);
  if (length < 0) return failed;
  out.clear();
  for (utf8proc_ssize_t i = 0; i < length; ++i) append_utf8(out, static_cast<uint32_t>(points[i]));
  return {};
}

// Characters below U+0300 neither combine nor decompose under NFC; their UTF-8 has no byte above CB.
bool is_plainly_composed(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0xCC; });
}

}  // namespace

struct Tokenizer::Impl {
  explicit Impl(TokenizerDefinition read)
      : definition(std::move(read)), bpe(definition.byte_ids, definition.merges, definition.unknown_id) {
    definition.merges = {};
    for (const auto& added : definition.added) {
      (added.normalized && definition.nfc ? normalized_added : raw_added).add(added);
      ids.emplace(added.content, added.id);
    }
    for (size_t id = 0; id < definition.bytes.size(); ++id) {
      if (definition.kinds[id] == TokenKind::normal)
        ids.emplace(definition.bytes[id], static_cast<int32_t>(id));
    }
    for (const std::string& bytes : definition.bytes) longest = std::max(longest, std::ssize(bytes));
    for (const auto& added : definition.added) longest = std::max(longest, std::ssize(added.content));
    drops_bytes = definition.unknown_id < 0 &&
                  std::ranges::any_of(definition.byte_ids, [](int32_t id) { return id < 0; });
  }

  TokenizerDefinition definition;
  Bpe bpe;
  AddedTokens raw_added;         // looked for in the text as given
  AddedTokens normalized_added;  // looked for after normalisation
  std::unordered_map<std::string_view, int32_t> ids;
  int64_t longest = 1;       // bytes of a token
  bool drops_bytes = false;  // text may have no token at all
};

Tokenizer::Tokenizer() = default;
Tokenizer::~Tokenizer() = default;

Result<std::unique_ptr<Tokenizer>> Tokenizer::create(const TokenizerSource& source) {
  VIVACE_TRY_ASSIGN(TokenizerDefinition definition, read_tokenizer_definition(source));
  for (auto& added : definition.added) {
    if (added.normalized && definition.nfc && !is_plainly_composed(added.content)) {
      std::string composed;
      VIVACE_TRY(compose(added.content, composed));
      added.content = std::move(composed);
    }
  }
  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer());
  tokenizer->impl_ = std::make_unique<Impl>(std::move(definition));
  return tokenizer;
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, SpecialTokens special) const {
  if (text.size() > kMaxTextBytes || is_valid_utf8(text)) return encode_with(text, special, {});
  return encode_with(replace_invalid_utf8(text), special, {});
}

Result<std::vector<int32_t>> Tokenizer::encode_marked(std::string_view text, std::string_view marks) const {
  if (marks.size() != text.size() || !is_valid_utf8(text)) {
    return invalid_argument(
        "tokenizer: marked text has {} bytes and {} marks, needs valid UTF-8 and as many marks", text.size(),
        marks.size());
  }
  return encode_with(text, SpecialTokens::parse, marks);
}

Result<std::vector<int32_t>> Tokenizer::encode_with(std::string_view text, SpecialTokens special,
                                                    std::string_view marks) const {
  if (text.size() > kMaxTextBytes) {
    return invalid_argument("tokenizer: the text has {} bytes, needs at most {}", text.size(), kMaxTextBytes);
  }
  const TokenizerDefinition& definition = impl_->definition;

  std::vector<int32_t> ids;
  Bpe::Scratch bpe_scratch;
  PreTokenizer::Scratch pre_scratch(definition.pre_tokenizer);
  const PreTokenizer::Sink on_word = [&](std::string_view word) {
    if (definition.ignore_merges) {
      const auto whole = impl_->ids.find(word);
      if (whole != impl_->ids.end() && definition.kinds[whole->second] == TokenKind::normal) {
        ids.push_back(whole->second);
        return;
      }
    }
    impl_->bpe.encode(word, bpe_scratch, ids);
  };
  auto on_token = [&](int32_t id) { ids.push_back(id); };
  auto on_normal = [&](std::string_view piece) {
    return definition.pre_tokenizer.split(piece, pre_scratch, on_word);
  };
  std::string composed;
  auto on_raw = [&](std::string_view piece) -> Status {
    const size_t piece_start = piece.data() - text.data(), piece_size = piece.size();
    if (definition.nfc && !is_plainly_composed(piece)) {
      VIVACE_TRY(compose(piece, composed));
      piece = composed;
    }
    // Normalisation moved the marks' bytes: here control tokens are looked for only if the whole piece is marked.
    const std::string_view piece_marks = marks.empty() ? marks : marks.substr(piece_start, piece_size);
    const bool as_text = piece_marks.find('\0') != std::string_view::npos;
    return impl_->normalized_added.split(piece, as_text ? SpecialTokens::as_text : special, {}, on_normal,
                                         on_token);
  };
  VIVACE_TRY(impl_->raw_added.split(text, special, marks, on_raw, on_token));
  return ids;
}

int64_t Tokenizer::least_tokens(std::string_view text) const {
  const TokenizerDefinition& definition = impl_->definition;
  int64_t bytes = std::ssize(text);
  if (impl_->drops_bytes && definition.nfc) return 0;
  if (impl_->drops_bytes) {
    bytes = std::ranges::count_if(
        text, [&](char c) { return definition.byte_ids[static_cast<unsigned char>(c)] >= 0; });
  } else if (definition.nfc) {
    // Composing makes one byte of four beyond ASCII at worst (U+1FBE U+0308 U+0301, 7 bytes, is U+0390, 2 bytes).
    const int64_t other = std::ranges::count_if(text, [](char c) { return (c & 0x80) != 0; });
    bytes -= other - other / 4;
  }
  return (bytes + impl_->longest - 1) / impl_->longest;
}

int64_t Tokenizer::longest_token() const {
  return impl_->longest;
}

std::string_view Tokenizer::bytes_of(int32_t id, bool skip_special) const {
  if (id < 0 || id >= vocab() || (skip_special && is_special(id))) return {};
  return impl_->definition.bytes[id];
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids, bool skip_special) const {
  std::string bytes;
  for (int32_t id : ids) bytes += bytes_of(id, skip_special);
  return is_valid_utf8(bytes) ? bytes : replace_invalid_utf8(bytes);
}

int64_t Tokenizer::vocab() const {
  return static_cast<int64_t>(impl_->definition.bytes.size());
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab() && impl_->definition.kinds[id] == TokenKind::control;
}

int32_t Tokenizer::id_of(std::string_view token) const {
  const auto found = impl_->ids.find(token);
  return found == impl_->ids.end() ? -1 : found->second;
}

bool Tokenizer::add_bos() const {
  return impl_->definition.add_bos;
}

int32_t Tokenizer::bos_id() const {
  return impl_->definition.bos_id;
}

}  // namespace vivace::model
