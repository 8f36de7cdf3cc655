#pragma once

namespace vivace {

/// Rows whose squares add up to more than fp32 holds are squared anew after this factor: the largest value, 2^128, becomes 2^48, and rows
/// of up to 2^31 values fit. eps, which is next to nothing beside such a mean, is left out there.
inline constexpr float kTinyFactor = 0x1p-80f;

}  // namespace vivace
