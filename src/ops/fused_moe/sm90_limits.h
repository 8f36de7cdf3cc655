#pragma once

namespace vivace::moe_sm90 {

/// Tokens, and rows of an expert if all are alike to the router. With more rows those of sm90.wide are faster.
inline constexpr int kMaxTokens = 128, kMaxRows = 10;
/// Rows of an expert up to which few are multiplied at a time; more of one expert are cut into blocks.
inline constexpr int kFewRows = 4;
/// Outputs of tokens, top_k of each and the shared expert's, that a CTA keeps for its columns of y.
inline constexpr int kMaxSlots = 1152;
inline constexpr int kMaxExperts = 1024;

}  // namespace vivace::moe_sm90
