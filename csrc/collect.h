// Collect few values of many, with their places: what top-k and survivors.h share.
#pragma once

#include "common.h"

constexpr int64_t kRun = 64;  // values whose flags fill one mask

// Takes the lowest bit out of `mask` and appends its value; appends nothing if there is none.
FXCOMP_INLINE void append_lowest(uint64_t& mask, const float* values, int64_t start, float* found_values,
                                 int32_t* found_places, int64_t& count) {
    const int64_t i = count_trailing_zeros(mask) & (kRun - 1);
    found_values[count] = values[i];
    found_places[count] = static_cast<int32_t>(start + i);
    count += mask != 0;
    mask &= mask - 1;
}

// Appends the values of a run that begins at `start` whose flag is 1. There must be room for two more than are found.
FXCOMP_INLINE void append_flagged(const uint8_t* flags, const float* values, int64_t start, float* found_values,
                                  int32_t* found_places, int64_t& count) {
    uint64_t mask = 0;
    for (int64_t byte = 0; byte < kRun / 8; ++byte) {
        mask |= static_cast<uint64_t>(pack_eight(flags + 8 * byte)) << (8 * byte);
    }
    // Most runs have none or one: taking two without a branch avoids most mispredictions.
    append_lowest(mask, values, start, found_values, found_places, count);
    append_lowest(mask, values, start, found_values, found_places, count);
    while (mask != 0) append_lowest(mask, values, start, found_values, found_places, count);
}
