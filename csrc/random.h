// Random bits from counters: fxcomp/compressors/randomness.py has the words and is the reference.
#pragma once

#include "common.h"

FXCOMP_INLINE uint32_t mix_bits(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0xd35a2d97u;
    return x ^ (x >> 15);
}

// A segment's stream at one step.
struct Stream {
    uint32_t low, high;
};

// `state` is two int64 a segment: key, step.
FXCOMP_INLINE Stream stream_of(const int64_t* state) {
    const auto key = static_cast<uint64_t>(state[0]), step = static_cast<uint64_t>(state[1]);
    const uint32_t low = mix_bits(static_cast<uint32_t>(key ^ step));
    return {low, mix_bits(static_cast<uint32_t>(key >> 32) ^ static_cast<uint32_t>(step >> 32) ^ low)};
}

// The bits at a counter. Vectorises: three multiplications of 32 bits a value.
FXCOMP_INLINE uint32_t random_bits(Stream stream, uint32_t counter) {
    uint32_t x = counter + stream.low;
    x = (x ^ (x >> 16)) * 0x7feb352du + stream.high;
    return mix_bits(x);
}

// In [0, 1), a multiple of 2^-24. The bits are cast as int32, which vectorises everywhere.
FXCOMP_INLINE float uniform(Stream stream, uint32_t counter) {
    return static_cast<float>(static_cast<int32_t>(random_bits(stream, counter) >> 8)) * 0x1p-24f;
}

// Raises the step of each segment's stream. Wraps, as torch's int64 do: a loaded state may hold any step.
FXCOMP_INLINE void raise_steps(int64_t* state, int64_t segment_count) {
    for (int64_t s = 0; s < segment_count; ++s) {
        state[2 * s + 1] = static_cast<int64_t>(static_cast<uint64_t>(state[2 * s + 1]) + 1);
    }
}
