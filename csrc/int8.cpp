// int8 with one fp32 scale a block: fxcomp/compressors/int8.py has the formulas and the layout.
//
// Encode reads a block twice, the second time from the cache, so main memory sees 12 bytes an element with error
// feedback and 4 without, plus the codes. Decode takes all ranks tile by tile and writes the mean once.
#include "common.h"

// Adding and subtracting 1.5 * 2^23 rounds to the nearest even integer, whose low byte is the sum's low byte.
constexpr float kRound = 12582912.0f;

template <bool kFeedback>
FXCOMP_INLINE void encode_block(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                                uint8_t* FXCOMP_RESTRICT scale_out, int8_t* FXCOMP_RESTRICT codes, int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        largest = std::max(largest, magnitude_bits(compensated<kFeedback>(bucket, residual, i)));
    }
    if (largest >= kInfinityBits) {
        store_float(scale_out, float_of(kNanBits));
        std::memset(codes, 0, static_cast<size_t>(size));
        return;
    }
    const float scale = float_of(largest) / 127.0f;
    const float divisor = scale > 0.0f ? scale : 1.0f;
    store_float(scale_out, scale);
    for (int64_t i = 0; i < size; ++i) {
        const float value = compensated<kFeedback>(bucket, residual, i);
        float quotient = value / divisor;
        quotient = quotient < -127.0f ? -127.0f : quotient;
        quotient = quotient > 127.0f ? 127.0f : quotient;
        const float shifted = quotient + kRound;
        codes[i] = static_cast<int8_t>(bits_of(shifted));
        if (kFeedback) residual[i] = value - (shifted - kRound) * scale;
    }
}

template <bool kFeedback>
FXCOMP_INLINE void encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                          int64_t segment_count, int64_t block) {
    uint8_t* scale = payload;
    int8_t* const first_code = reinterpret_cast<int8_t*>(payload) + 4 * count_blocks(segments, segment_count, block);
    int8_t* code = first_code;
    for (int64_t s = 0; s < segment_count; ++s) {
        for (int64_t left = segments[s]; left > 0; left -= block) {
            const int64_t size = std::min(left, block);
            encode_block<kFeedback>(bucket, residual, scale, code, size);
            bucket += size;
            if (kFeedback) residual += size;
            scale += 4;
            code += size;
        }
    }
    fill_up(reinterpret_cast<uint8_t*>(code), code - first_code);
}

FXCOMP_KERNEL void fxcomp_int8_encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                                      int64_t segment_count, int64_t block) {
    if (residual != nullptr) {
        encode<true>(bucket, residual, payload, segments, segment_count, block);
    } else {
        encode<false>(bucket, residual, payload, segments, segment_count, block);
    }
}

FXCOMP_KERNEL void fxcomp_int8_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                      int64_t segment_count, int64_t block, float* FXCOMP_RESTRICT out) {
    const int64_t blocks = count_blocks(segments, segment_count, block);
    int64_t elements = 0;
    for (int64_t s = 0; s < segment_count; ++s) elements += segments[s];
    const int64_t payload_bytes = 4 * blocks + round_up(elements, 4);
    const float factor = mean_factor(ranks);

    int64_t index = 0, element = 0;
    for (int64_t s = 0; s < segment_count; ++s) {
        for (int64_t left = segments[s]; left > 0; left -= block, ++index) {
            for (int64_t in_block = std::min(left, block); in_block > 0;) {
                const int64_t size = std::min(in_block, kTile);
                float* FXCOMP_RESTRICT tile = out + element;
                for (int64_t rank = 0; rank < ranks; ++rank) {
                    const uint8_t* payload = payloads + rank * payload_bytes;
                    const float scale = load_float(payload + 4 * index);
                    const int8_t* FXCOMP_RESTRICT code =
                        reinterpret_cast<const int8_t*>(payload) + 4 * blocks + element;
                    if (rank == 0) {
                        for (int64_t i = 0; i < size; ++i) tile[i] = static_cast<float>(code[i]) * scale;
                    } else {
                        for (int64_t i = 0; i < size; ++i) tile[i] += static_cast<float>(code[i]) * scale;
                    }
                }
                if (ranks > 1) {
                    for (int64_t i = 0; i < size; ++i) tile[i] *= factor;
                }
                element += size;
                in_block -= size;
            }
        }
    }
}
