#pragma once

#include <array>
#include <cstdint>

namespace vivace {

/// Philox4x32-10: four random words from a counter and a key, without state.
constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = kMultiplier0 * counter[0], b = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

/// The uniform number in [0, 1) that draws the token at `position` of a request with this seed: 53 bits of
/// Philox with the seed as key and the position as counter.
constexpr double draw_uniform(uint64_t seed, int64_t position) {
  const uint64_t at = static_cast<uint64_t>(position);
  const std::array<uint32_t, 4> words =
      philox4x32({static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), 0, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<double>((uint64_t{words[0]} << 32 | words[1]) >> 11) * 0x1p-53;
}

}  // namespace vivace
