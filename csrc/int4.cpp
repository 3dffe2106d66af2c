// int4 with one fp32 scale a block: fxcomp/compressors/int4.py has the formulas and the layout.
//
// Encode reads a block twice, the second time from the cache, so main memory sees 12 bytes an element with error
// feedback and 4 without, plus the codes. Codes are made one a byte in a short array, then packed in pairs: both loops
// vectorise, and one over pairs of values would not. Decode goes the same way back, tile by tile for all ranks.
#include "common.h"

// Adding and subtracting 1.5 * 2^23 rounds to the nearest even integer, whose low bits are the sum's low bits.
constexpr float kRound = 12582912.0f;

// Values whose codes are made before they are packed. Even, so that a run ends with a whole byte.
constexpr int64_t kRun = 128;

// Writes the codes of up to kRun values and their new residual.
template <bool kFeedback>
FXCOMP_INLINE void encode_run(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                              uint8_t* FXCOMP_RESTRICT pairs, float scale, float divisor, int64_t size) {
    alignas(64) uint8_t codes[kRun];
    for (int64_t i = 0; i < size; ++i) {
        const float value = compensated<kFeedback>(bucket, residual, i);
        float quotient = value / divisor;
        quotient = quotient < -7.0f ? -7.0f : quotient;
        quotient = quotient > 7.0f ? 7.0f : quotient;
        const float shifted = quotient + kRound;
        codes[i] = static_cast<uint8_t>(bits_of(shifted) & 15u);
        if (kFeedback) residual[i] = value - (shifted - kRound) * scale;
    }
    if (size % 2 != 0) codes[size] = 0;
    for (int64_t i = 0; i < ceil_divide(size, 2); ++i) {
        pairs[i] = static_cast<uint8_t>(codes[2 * i] | (codes[2 * i + 1] << 4));
    }
}

template <bool kFeedback>
FXCOMP_INLINE void encode_block(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                                uint8_t* FXCOMP_RESTRICT scale_out, uint8_t* FXCOMP_RESTRICT pairs, int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        largest = std::max(largest, magnitude_bits(compensated<kFeedback>(bucket, residual, i)));
    }
    if (largest >= kInfinityBits) {
        store_float(scale_out, float_of(kNanBits));
        std::memset(pairs, 0, static_cast<size_t>(ceil_divide(size, 2)));
        return;
    }
    const float scale = float_of(largest) / 7.0f;
    const float divisor = scale > 0.0f ? scale : 1.0f;
    store_float(scale_out, scale);
    for (int64_t start = 0; start < size; start += kRun) {
        float* const left_out = kFeedback ? residual + start : nullptr;
        if (size - start >= kRun) {
            encode_run<kFeedback>(bucket + start, left_out, pairs + start / 2, scale, divisor, kRun);
        } else {
            encode_run<kFeedback>(bucket + start, left_out, pairs + start / 2, scale, divisor, size - start);
        }
    }
}

template <bool kFeedback>
FXCOMP_INLINE void encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                          int64_t segment_count, int64_t block) {
    uint8_t* scale = payload;
    uint8_t* const first_pair = payload + 4 * count_blocks(segments, segment_count, block);
    uint8_t* pair = first_pair;
    for (int64_t s = 0; s < segment_count; ++s) {
        for (int64_t left = segments[s]; left > 0; left -= block) {
            const int64_t size = std::min(left, block);
            encode_block<kFeedback>(bucket, residual, scale, pair, size);
            bucket += size;
            if (kFeedback) residual += size;
            scale += 4;
            pair += ceil_divide(size, 2);
        }
    }
    fill_up(pair, pair - first_pair);
}

FXCOMP_KERNEL void fxcomp_int4_encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                                      int64_t segment_count, int64_t block) {
    if (residual != nullptr) {
        encode<true>(bucket, residual, payload, segments, segment_count, block);
    } else {
        encode<false>(bucket, residual, payload, segments, segment_count, block);
    }
}

// Writes the values of up to kRun codes, or adds them.
template <bool kAdd>
FXCOMP_INLINE void decode_run(const uint8_t* FXCOMP_RESTRICT pairs, float* FXCOMP_RESTRICT out, float scale,
                              int64_t size) {
    alignas(64) int8_t codes[kRun];
    for (int64_t i = 0; i < ceil_divide(size, 2); ++i) {
        codes[2 * i] = static_cast<int8_t>(((pairs[i] & 15) ^ 8) - 8);
        codes[2 * i + 1] = static_cast<int8_t>(((pairs[i] >> 4) ^ 8) - 8);
    }
    for (int64_t i = 0; i < size; ++i) {
        const float value = static_cast<float>(codes[i]) * scale;
        out[i] = kAdd ? out[i] + value : value;
    }
}

// A run of all ranks, then their mean.
FXCOMP_INLINE void decode_ranks(const uint8_t* scales, const uint8_t* pairs, int64_t ranks, int64_t payload_bytes,
                                float* FXCOMP_RESTRICT out, int64_t size) {
    decode_run<false>(pairs, out, load_float(scales), size);
    for (int64_t rank = 1; rank < ranks; ++rank) {
        const int64_t offset = rank * payload_bytes;
        decode_run<true>(pairs + offset, out, load_float(scales + offset), size);
    }
    if (ranks == 1) return;
    const float factor = mean_factor(ranks);
    for (int64_t i = 0; i < size; ++i) out[i] *= factor;
}

FXCOMP_KERNEL void fxcomp_int4_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                      int64_t segment_count, int64_t block, float* FXCOMP_RESTRICT out) {
    const int64_t scale_bytes = 4 * count_blocks(segments, segment_count, block);
    int64_t code_bytes = 0;
    for (int64_t s = 0; s < segment_count; ++s) code_bytes += ceil_divide(segments[s], 2);
    const int64_t payload_bytes = scale_bytes + round_up(code_bytes, 4);

    const uint8_t* scales = payloads;
    const uint8_t* pairs = payloads + scale_bytes;
    for (int64_t s = 0; s < segment_count; ++s) {
        for (int64_t left = segments[s]; left > 0; left -= block, scales += 4) {
            for (int64_t in_block = std::min(left, block); in_block > 0; in_block -= kRun) {
                const int64_t size = std::min(in_block, kRun);
                if (size == kRun) {
                    decode_ranks(scales, pairs, ranks, payload_bytes, out, kRun);
                } else {
                    decode_ranks(scales, pairs, ranks, payload_bytes, out, size);
                }
                out += size;
                pairs += ceil_divide(size, 2);
            }
        }
    }
}
