// What every kernel file shares: exports, inlining, and reading floats as bits.
//
// A kernel gives the same bits as its reference in fxcomp/compressors/<same name>.py: compile without fused
// multiply-add (-ffp-contract=off), and let no sum depend on the vector width.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "levels.h"

#if defined(_WIN32)
#define FXCOMP_EXPORT extern "C" __declspec(dllexport)
#else
#define FXCOMP_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// A helper must be inlined into the body to be compiled for the body's instruction set (levels.h); in a class, a method.
#if defined(__GNUC__)
#define FXCOMP_INLINE static inline __attribute__((always_inline))
#define FXCOMP_METHOD inline __attribute__((always_inline))
#define FXCOMP_LAMBDA __attribute__((always_inline))
#define FXCOMP_RESTRICT __restrict__
#else
#define FXCOMP_LAMBDA
#define FXCOMP_INLINE static inline
#define FXCOMP_METHOD inline
#define FXCOMP_RESTRICT __restrict
#endif

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kNanBits = 0x7fc00000u;

FXCOMP_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

FXCOMP_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// |value| as an unsigned number of the same order; not finite from kInfinityBits on, and NaN is the largest.
FXCOMP_INLINE uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

// Payloads are bytes, and a float in one need not lie on a multiple of four.
FXCOMP_INLINE void store_float(uint8_t* to, float value) { std::memcpy(to, &value, sizeof value); }

FXCOMP_INLINE float load_float(const uint8_t* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// The largest scale of which `largest` are finite: residuals stay finite at the end of fp32.
FXCOMP_INLINE float most_scale(float largest) {
    const float scale = float_of(kInfinityBits - 1) / largest;
    return magnitude_bits(scale * largest) < kInfinityBits ? scale : float_of(bits_of(scale) - 1);
}

// v, the vector to compress at i: the gradient, plus what earlier steps left out.
template <bool kFeedback>
FXCOMP_INLINE float compensated(const float* bucket, const float* residual, int64_t i) {
    return kFeedback ? bucket[i] + residual[i] : bucket[i];
}

FXCOMP_INLINE int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

FXCOMP_INLINE int64_t round_up(int64_t a, int64_t multiple) { return ceil_divide(a, multiple) * multiple; }

FXCOMP_INLINE int64_t count_blocks(const int64_t* segments, int64_t segment_count, int64_t block) {
    int64_t blocks = 0;
    for (int64_t s = 0; s < segment_count; ++s) blocks += ceil_divide(segments[s], block);
    return blocks;
}

// All values of a bucket.
FXCOMP_INLINE int64_t count_values(const int64_t* segments, int64_t segment_count) {
    return std::accumulate(segments, segments + segment_count, int64_t{0});
}

// Zeros behind a section of `bytes` bytes, up to a multiple of four.
FXCOMP_INLINE void fill_up(uint8_t* end, int64_t bytes) {
    for (int64_t i = bytes; i < round_up(bytes, 4); ++i) *end++ = 0;
}

// The mean over ranks is the sum times this, as in the references.
FXCOMP_INLINE bool is_power_of_two(int64_t ranks) { return (ranks & (ranks - 1)) == 0; }

FXCOMP_INLINE float mean_factor(int64_t ranks) { return static_cast<float>(1.0 / static_cast<double>(ranks)); }

// Eight bytes of 0 or 1 become one byte, the first in the lowest bit.
FXCOMP_INLINE uint8_t pack_eight(const uint8_t* flags) {
    uint64_t word;
    std::memcpy(&word, flags, sizeof word);
    return static_cast<uint8_t>((word * 0x0102040810204080ull) >> 56);
}

FXCOMP_INLINE int64_t count_trailing_zeros(uint64_t bits) {
#if defined(__GNUC__)
    return bits == 0 ? 64 : __builtin_ctzll(bits);
#else
    int64_t zeros = 0;
    while (zeros < 64 && ((bits >> zeros) & 1) == 0) ++zeros;
    return zeros;
#endif
}

// About 20 us of work at memory speed: what in_parallel gives a thread at least.
constexpr int64_t kGrain = 65536;

// What a thread gets at least where all wait for each other between stages: half of 2^18 is not worth that.
constexpr int64_t kStagedGrain = 3 * kGrain;

// Elements decoded for all ranks before going on: the running sum stays in the first-level cache.
constexpr int64_t kTile = 1024;
