// One bit a value and one fp32 scale a block: fxcomp/compressors/sign.py has the formulas and the layout.
//
// Encode reads a block twice, the second time from the cache, so main memory sees 12 bytes an element with error
// feedback and 4 without. Decode takes all ranks tile by tile and writes the mean once.
#include "common.h"

// The sum of magnitudes runs in 64 strided lanes, which then fold in halves: the same order at any vector width.
constexpr int64_t kLanes = 64;

template <bool kFeedback>
FXCOMP_INLINE float sum_magnitudes(const float* bucket, const float* residual, int64_t size) {
    float lanes[kLanes] = {};
    int64_t start = 0;
    for (; start + kLanes <= size; start += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            lanes[lane] += float_of(magnitude_bits(compensated<kFeedback>(bucket, residual, start + lane)));
        }
    }
    for (int64_t lane = 0; lane < size - start; ++lane) {
        lanes[lane] += float_of(magnitude_bits(compensated<kFeedback>(bucket, residual, start + lane)));
    }
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

// Writes the bits of up to 64 values and their new residual.
template <bool kFeedback>
FXCOMP_INLINE void encode_run(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                              uint8_t* FXCOMP_RESTRICT bits, float scale, int64_t size) {
    alignas(64) uint8_t flags[kLanes] = {};
    for (int64_t i = 0; i < size; ++i) {
        flags[i] = compensated<kFeedback>(bucket, residual, i) >= 0.0f;
    }
    if (kFeedback) {
        for (int64_t i = 0; i < size; ++i) {
            const float value = compensated<kFeedback>(bucket, residual, i);
            residual[i] = value - (value >= 0.0f ? scale : -scale);
        }
    }
    for (int64_t byte = 0; byte < ceil_divide(size, 8); ++byte) bits[byte] = pack_eight(flags + 8 * byte);
}

template <bool kFeedback>
FXCOMP_INLINE void encode_block(const float* bucket, float* residual, uint8_t* scale_out, uint8_t* bits,
                                int64_t size) {
    const float scale = sum_magnitudes<kFeedback>(bucket, residual, size) / static_cast<float>(size);
    if (magnitude_bits(scale) >= kInfinityBits) {
        store_float(scale_out, float_of(kNanBits));
        std::memset(bits, 0, static_cast<size_t>(ceil_divide(size, 8)));
        return;
    }
    store_float(scale_out, scale);
    int64_t start = 0;
    for (; start + kLanes <= size; start += kLanes) {
        encode_run<kFeedback>(bucket + start, kFeedback ? residual + start : nullptr, bits + start / 8, scale, kLanes);
    }
    if (start < size) encode_run<kFeedback>(bucket + start, kFeedback ? residual + start : nullptr, bits + start / 8, scale, size - start);
}

template <bool kFeedback>
FXCOMP_INLINE void encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                          int64_t segment_count, int64_t block) {
    uint8_t* scale = payload;
    uint8_t* const first_byte = payload + 4 * count_blocks(segments, segment_count, block);
    uint8_t* bits = first_byte;
    for (int64_t s = 0; s < segment_count; ++s) {
        for (int64_t left = segments[s]; left > 0; left -= block) {
            const int64_t size = std::min(left, block);
            encode_block<kFeedback>(bucket, residual, scale, bits, size);
            bucket += size;
            if (kFeedback) residual += size;
            scale += 4;
            bits += ceil_divide(size, 8);
        }
    }
    fill_up(bits, bits - first_byte);
}

FXCOMP_KERNEL void fxcomp_sign_encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                                      int64_t segment_count, int64_t block) {
    if (residual != nullptr) {
        encode<true>(bucket, residual, payload, segments, segment_count, block);
    } else {
        encode<false>(bucket, residual, payload, segments, segment_count, block);
    }
}

// scale where the bit is set, -scale where it is not.
FXCOMP_INLINE float signed_scale(uint32_t scale_bits, uint32_t word, int shift) {
    return float_of(scale_bits ^ ((~word >> shift) << 31));
}

template <bool kFirst>
FXCOMP_INLINE void add_rank(float* FXCOMP_RESTRICT tile, const uint8_t* FXCOMP_RESTRICT bits, float scale,
                            int64_t size) {
    const uint32_t scale_bits = bits_of(scale);
    int64_t start = 0;
    for (; start + 32 <= size; start += 32) {
        uint32_t word;
        std::memcpy(&word, bits + start / 8, sizeof word);
        float* FXCOMP_RESTRICT run = tile + start;
        for (int i = 0; i < 32; ++i) {
            run[i] = kFirst ? signed_scale(scale_bits, word, i) : run[i] + signed_scale(scale_bits, word, i);
        }
    }
    for (int64_t i = start; i < size; ++i) {
        const float value = signed_scale(scale_bits, bits[i / 8], static_cast<int>(i % 8));
        tile[i] = kFirst ? value : tile[i] + value;
    }
}

FXCOMP_KERNEL void fxcomp_sign_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                      int64_t segment_count, int64_t block, float* FXCOMP_RESTRICT out) {
    const int64_t blocks = count_blocks(segments, segment_count, block);
    int64_t bytes = 0;
    for (int64_t s = 0; s < segment_count; ++s) bytes += ceil_divide(segments[s], 8);
    const int64_t payload_bytes = 4 * blocks + round_up(bytes, 4);
    const float factor = mean_factor(ranks);

    int64_t index = 0, byte = 4 * blocks;
    for (int64_t s = 0; s < segment_count; ++s) {
        for (int64_t left = segments[s]; left > 0; left -= block, ++index) {
            for (int64_t in_block = std::min(left, block); in_block > 0;) {
                const int64_t size = std::min(in_block, kTile);
                for (int64_t rank = 0; rank < ranks; ++rank) {
                    const uint8_t* payload = payloads + rank * payload_bytes;
                    const float scale = load_float(payload + 4 * index);
                    if (rank == 0) {
                        add_rank<true>(out, payload + byte, scale, size);
                    } else {
                        add_rank<false>(out, payload + byte, scale, size);
                    }
                }
                if (ranks > 1) {
                    for (int64_t i = 0; i < size; ++i) out[i] *= factor;
                }
                out += size;
                byte += ceil_divide(size, 8);
                in_block -= size;
            }
        }
    }
}
