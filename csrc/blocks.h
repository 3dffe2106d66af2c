// Quantise a bucket block by block: int8, int4, int2 and sign are this with different codecs.
//
// A payload holds the fp32 scales of all blocks, then the codes of b bits, each segment's from a new byte on, then zeros
// up to a multiple of four; fxcomp/compressors/block_codes.py is the reference. A codec has
//
//     kBits, kIsRandom                              1, 2, 4 or 8; whether `encode` uses u
//     scale_of<kFeedback>(bucket, residual, size)   a block's scale, not finite where it cannot be sent
//     largest_value()                               what the largest code decodes to, in units of the scale
//     divisor_of(scale)                             what `encode` wants to know, computed once a block
//     encode(value, scale, divisor, u)              the code, and what it decodes to
//     decode(code, scale)                           that again
//
// Encode reads a block twice, the second time from the cache, so main memory sees 12 bytes a value with error feedback
// and 4 without, plus the codes. Codes are made one a byte in a short array and then packed: both loops vectorise, and
// one loop over bytes of codes would not. Decode goes the same way back, run by run for all ranks, and writes the mean
// once.
#pragma once

#include <cmath>

#include "common.h"
#include "random.h"
#include "stream.h"
#include "threads.h"

// Values whose codes are made before they are packed. A multiple of 64: a run ends with a whole byte. More where more
// codes share a byte, for what was written in parts is read as a whole only after it has left the store buffer.
template <int kBits>
constexpr int64_t kRun = kBits < 4 ? 512 : 128;

struct Coded {
    uint32_t code;
    float value;
};

// How a bucket is cut into blocks.
struct Cut {
    const int64_t* segments;
    int64_t segment_count, block;
};

FXCOMP_INLINE int64_t count_blocks(const Cut& cut) { return count_blocks(cut.segments, cut.segment_count, cut.block); }

FXCOMP_INLINE int64_t count_code_bytes(const Cut& cut, int64_t bits) {
    int64_t bytes = 0;
    for (int64_t s = 0; s < cut.segment_count; ++s) bytes += ceil_divide(cut.segments[s] * bits, 8);
    return bytes;
}

// A block: which segment it is of, where it begins there and in the bucket, and the byte of its first code.
struct Place {
    int64_t segment, in_segment, element, byte;
};

FXCOMP_INLINE Place place_of(const Cut& cut, int64_t bits, int64_t index) {
    Place place{0, 0, 0, 0};
    for (; place.segment < cut.segment_count; ++place.segment) {
        const int64_t size = cut.segments[place.segment], blocks = ceil_divide(size, cut.block);
        if (index < blocks) break;
        index -= blocks;
        place.element += size;
        place.byte += ceil_divide(size * bits, 8);
    }
    place.in_segment = index * cut.block;
    place.element += place.in_segment;
    place.byte += place.in_segment * bits / 8;
    return place;
}

FXCOMP_INLINE int64_t block_size(const Cut& cut, const Place& place) {
    return std::min(cut.segments[place.segment] - place.in_segment, cut.block);
}

FXCOMP_INLINE void go_on(const Cut& cut, int64_t bits, int64_t size, Place& place) {
    place.in_segment += size;
    place.element += size;
    place.byte += ceil_divide(size * bits, 8);
    while (place.segment < cut.segment_count && place.in_segment >= cut.segments[place.segment]) {
        ++place.segment;
        place.in_segment = 0;
    }
}

// The codes that share a packed byte, while they are one a byte.
template <int kBits>
struct Together;
template <>
struct Together<4> {
    using Word = uint16_t;
};
template <>
struct Together<2> {
    using Word = uint32_t;
};
template <>
struct Together<1> {
    using Word = uint64_t;
};
template <>
struct Together<8> {
    using Word = uint8_t;
};

// Codes become 8 / kBits a byte, the first in the lowest bits. Zeros follow the last code.
template <int kBits>
FXCOMP_INLINE void pack(const typename Together<kBits>::Word* FXCOMP_RESTRICT codes, uint8_t* FXCOMP_RESTRICT packed,
                        int64_t bytes) {
    for (int64_t i = 0; i < bytes; ++i) {
        const auto word = codes[i];
        if constexpr (kBits == 4) {
            packed[i] = static_cast<uint8_t>(word | (word >> 4));
        } else if constexpr (kBits == 2) {
            packed[i] = static_cast<uint8_t>(word | (word >> 6) | (word >> 12) | (word >> 18));
        } else {
            packed[i] = static_cast<uint8_t>((word * 0x0102040810204080ull) >> 56);
        }
    }
}

template <int kBits>
FXCOMP_INLINE void unpack(const uint8_t* FXCOMP_RESTRICT packed, typename Together<kBits>::Word* FXCOMP_RESTRICT codes,
                          int64_t bytes) {
    for (int64_t i = 0; i < bytes; ++i) {
        const typename Together<kBits>::Word byte = packed[i];
        if constexpr (kBits == 4) {
            codes[i] = (byte | (byte << 4)) & 0x0f0f;
        } else if constexpr (kBits == 2) {
            codes[i] = (byte | (byte << 6) | (byte << 12) | (byte << 18)) & 0x03030303u;
        } else {
            const uint64_t spread = (byte * 0x0101010101010101ull) & 0x8040201008040201ull;
            codes[i] = ((spread + 0x7f7f7f7f7f7f7f7full) >> 7) & 0x0101010101010101ull;
        }
    }
}

// Up to kRun values: their codes, and their new residual.
template <class Codec, bool kFeedback>
FXCOMP_INLINE void encode_run(const Codec& codec, const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                              uint8_t* FXCOMP_RESTRICT packed, float scale, float divisor, Stream stream,
                              uint32_t counter, int32_t size) {
    using Word = typename Together<Codec::kBits>::Word;
    constexpr int64_t kMost = kRun<Codec::kBits>;
    alignas(64) Word words[kMost / sizeof(Word)];
    if (Codec::kBits < 8 && size < kMost) std::memset(words, 0, sizeof words);  // what follows the last code
    uint8_t* FXCOMP_RESTRICT const codes = Codec::kBits == 8 ? packed : reinterpret_cast<uint8_t*>(words);
    for (int32_t i = 0; i < size; ++i) {
        const float value = compensated<kFeedback>(bucket, residual, i);
        const float u = Codec::kIsRandom ? uniform(stream, counter + static_cast<uint32_t>(i)) : 0.0f;
        const Coded coded = codec.encode(value, scale, divisor, u);
        codes[i] = static_cast<uint8_t>(coded.code);
        if (kFeedback) residual[i] = value - coded.value;
    }
    if constexpr (Codec::kBits < 8) pack<Codec::kBits>(words, packed, ceil_divide(size * Codec::kBits, 8));
}

// A block with this scale.
template <class Codec, bool kFeedback>
FXCOMP_INLINE void encode_block(const Codec& codec, const float* bucket, float* residual, float scale,
                                uint8_t* scale_out, uint8_t* packed, Stream stream, int64_t counter, int64_t size) {
    if (magnitude_bits(scale) >= kInfinityBits) {
        store_float(scale_out, float_of(kNanBits));
        std::memset(packed, 0, static_cast<size_t>(ceil_divide(size * Codec::kBits, 8)));
        return;
    }
    scale = std::min(scale, most_scale(codec.largest_value()));
    store_float(scale_out, scale);
    const float divisor = codec.divisor_of(scale);
    constexpr int64_t kMost = kRun<Codec::kBits>;
    for (int64_t start = 0; start < size; start += kMost) {
        float* const left_out = kFeedback ? residual + start : nullptr;
        uint8_t* const bytes = packed + start * Codec::kBits / 8;
        const auto first = static_cast<uint32_t>(counter + start);
        if (size - start >= kMost) {
            encode_run<Codec, kFeedback>(codec, bucket + start, left_out, bytes, scale, divisor, stream, first, kMost);
        } else {
            encode_run<Codec, kFeedback>(codec, bucket + start, left_out, bytes, scale, divisor, stream, first,
                                         static_cast<int32_t>(size - start));
        }
    }
}

// Each block's scale is made before the block in front of it is encoded: a scale is a long chain of operations, and
// so the processor has other work meanwhile.
template <class Codec, bool kFeedback>
FXCOMP_BODY void encode_range(const Codec codec, const Cut cut, const float* bucket, float* residual, uint8_t* payload,
                              const int64_t* state, int64_t begin, int64_t end) {
    uint8_t* const codes = payload + 4 * count_blocks(cut);
    Place place = place_of(cut, Codec::kBits, begin), ahead = place;
    float scale = 0.0f, scale_ahead = 0.0f;
    for (int64_t index = begin; index <= end; ++index) {
        if (index < end) {
            scale_ahead = codec.template scale_of<kFeedback>(bucket + ahead.element,
                                                             kFeedback ? residual + ahead.element : nullptr,
                                                             block_size(cut, ahead));
        }
        if (index > begin) {
            const Stream stream = Codec::kIsRandom ? stream_of(state + 2 * place.segment) : Stream{0, 0};
            encode_block<Codec, kFeedback>(codec, bucket + place.element, kFeedback ? residual + place.element : nullptr,
                                           scale, payload + 4 * (index - 1), codes + place.byte, stream,
                                           place.in_segment, block_size(cut, place));
        }
        place = ahead;
        scale = scale_ahead;
        if (index < end) go_on(cut, Codec::kBits, block_size(cut, ahead), ahead);
    }
}

// All of a kernel's encode. `state` is needed where the codec is random.
template <class Codec>
inline void encode_blocks(const Codec codec, const Cut cut, const float* bucket, float* residual, uint8_t* payload,
                          int64_t* state) {
    const int64_t blocks = count_blocks(cut), code_bytes = count_code_bytes(cut, Codec::kBits);
    const int64_t grain = kGrain / cut.block;
    if (residual != nullptr) {
        in_parallel(blocks, grain, [=](int64_t begin, int64_t end) {
            widest<encode_range<Codec, true>>(codec, cut, bucket, residual, payload, state, begin, end);
        });
    } else {
        in_parallel(blocks, grain, [=](int64_t begin, int64_t end) {
            widest<encode_range<Codec, false>>(codec, cut, bucket, residual, payload, state, begin, end);
        });
    }
    fill_up(payload + 4 * blocks + code_bytes, code_bytes);
    if (Codec::kIsRandom) raise_steps(state, cut.segment_count);
}

// Up to kRun values of one rank, written or added.
template <class Codec, bool kAdd>
FXCOMP_INLINE void decode_run(const Codec& codec, const uint8_t* FXCOMP_RESTRICT packed, float* FXCOMP_RESTRICT out,
                              float scale, int64_t size) {
    using Word = typename Together<Codec::kBits>::Word;
    alignas(64) Word words[kRun<Codec::kBits> / sizeof(Word)];
    if constexpr (Codec::kBits < 8) unpack<Codec::kBits>(packed, words, ceil_divide(size * Codec::kBits, 8));
    const uint8_t* FXCOMP_RESTRICT const codes =
        Codec::kBits == 8 ? packed : reinterpret_cast<const uint8_t*>(words);
    for (int64_t i = 0; i < size; ++i) {
        const float value = codec.decode(codes[i], scale);
        out[i] = kAdd ? out[i] + value : value;
    }
}

// Up to kRun values of all ranks, then their mean.
template <class Codec>
FXCOMP_INLINE void decode_ranks(const Codec& codec, const uint8_t* scales, const uint8_t* packed, int64_t ranks,
                                int64_t payload_bytes, float* FXCOMP_RESTRICT out, int64_t size) {
    decode_run<Codec, false>(codec, packed, out, load_float(scales), size);
    for (int64_t rank = 1; rank < ranks; ++rank) {
        const int64_t offset = rank * payload_bytes;
        decode_run<Codec, true>(codec, packed + offset, out, load_float(scales + offset), size);
    }
    if (ranks == 1) return;
    const float factor = mean_factor(ranks);
    for (int64_t i = 0; i < size; ++i) out[i] *= factor;
}

template <class Codec, bool kStream>
FXCOMP_BODY void decode_range(const Codec codec, const Cut cut, const uint8_t* payloads, int64_t ranks, float* out,
                              int64_t begin, int64_t end) {
    const int64_t scale_bytes = 4 * count_blocks(cut);
    const int64_t payload_bytes = scale_bytes + round_up(count_code_bytes(cut, Codec::kBits), 4);
    Place place = place_of(cut, Codec::kBits, begin);
    constexpr int64_t kMost = kRun<Codec::kBits>;
    LineWriter<kMost> writer;
    if (kStream) start_lines(writer, out + place.element);
    for (int64_t index = begin; index < end; ++index) {
        const int64_t size = block_size(cut, place);
        const uint8_t* const scales = payloads + 4 * index;
        const uint8_t* const packed = payloads + scale_bytes + place.byte;
        for (int64_t start = 0; start < size; start += kMost) {
            const uint8_t* const bytes = packed + start * Codec::kBits / 8;
            const int64_t in_run = std::min(kMost, size - start);
            float* const values = kStream ? next_values(writer) : out + place.element + start;
            if (in_run == kMost) {
                decode_ranks(codec, scales, bytes, ranks, payload_bytes, values, kMost);
            } else {
                decode_ranks(codec, scales, bytes, ranks, payload_bytes, values, in_run);
            }
            if (kStream) commit_values(writer, in_run);
        }
        go_on(cut, Codec::kBits, size, place);
    }
    if (kStream) finish_lines(writer);
}

// All of a kernel's decode.
template <class Codec>
inline void decode_blocks(const Codec codec, const Cut cut, const uint8_t* payloads, int64_t ranks, float* out) {
    const int64_t blocks = count_blocks(cut), grain = kGrain / cut.block / ranks;
    if (kCanStream && count_values(cut.segments, cut.segment_count) >= kStreamedElements) {
        in_parallel(blocks, grain, [=](int64_t begin, int64_t end) {
            widest<decode_range<Codec, true>>(codec, cut, payloads, ranks, out, begin, end);
        });
    } else {
        in_parallel(blocks, grain, [=](int64_t begin, int64_t end) {
            widest<decode_range<Codec, false>>(codec, cut, payloads, ranks, out, begin, end);
        });
    }
}

// max|v| of a block as bits, not finite where a value is not.
template <bool kFeedback>
FXCOMP_INLINE float largest_magnitude(const float* bucket, const float* residual, int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        largest = std::max(largest, magnitude_bits(compensated<kFeedback>(bucket, residual, i)));
    }
    return float_of(largest);
}

// Sums over a block run in 64 strided lanes, which then fold in halves: the same order at any vector width.
constexpr int64_t kLanes = 64;

template <int64_t kHalf>
FXCOMP_INLINE float fold(float* lanes) {
    for (int64_t lane = 0; lane < kHalf; ++lane) lanes[lane] += lanes[lane + kHalf];
    if constexpr (kHalf > 1) return fold<kHalf / 2>(lanes);
    return lanes[0];
}

template <bool kFeedback>
FXCOMP_INLINE float mean_magnitude(const float* bucket, const float* residual, int64_t size) {
    const auto magnitude = [=](int64_t i) FXCOMP_LAMBDA {
        return float_of(magnitude_bits(compensated<kFeedback>(bucket, residual, i)));
    };
    float lanes[kLanes];
    const int64_t whole = size / kLanes * kLanes;
    if (whole > 0) {
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = magnitude(lane);
    }
    for (int64_t start = kLanes; start < whole; start += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += magnitude(start + lane);
    }
    if (whole < size) {
        if (whole == 0) std::fill_n(lanes, kLanes, 0.0f);
        for (int64_t lane = 0; lane < size - whole; ++lane) lanes[lane] += magnitude(whole + lane);
    }
    return fold<kLanes / 2>(lanes) / static_cast<float>(size);
}

// Exports the kernels of a compressor that encodes with one codec, and with another if it has a state.
#define FXCOMP_BLOCK_KERNELS(name, codec, random_codec)                                                              \
    FXCOMP_EXPORT void fxcomp_##name##_encode(const float* bucket, float* residual, uint8_t* payload, int64_t* state, \
                                              const void*, const int64_t* segments, int64_t segment_count,           \
                                              int64_t block) {                                                       \
        const Cut cut{segments, segment_count, block};                                                               \
        if (state != nullptr) {                                                                                      \
            encode_blocks(random_codec, cut, bucket, residual, payload, state);                                      \
        } else {                                                                                                     \
            encode_blocks(codec, cut, bucket, residual, payload, nullptr);                                           \
        }                                                                                                            \
    }                                                                                                                \
    FXCOMP_EXPORT int32_t fxcomp_##name##_decode(const uint8_t* payloads, int64_t ranks, float* out, const void*,    \
                                                 const void*, const int64_t* segments, int64_t segment_count,        \
                                                 int64_t block) {                                                    \
        decode_blocks(codec, {segments, segment_count, block}, payloads, ranks, out);                                \
        return 1;                                                                                                    \
    }
