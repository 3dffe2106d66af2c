// int8 on scales that the ranks share: fxcomp/compressors/shared_int8.py has the formulas and the layout.
//
// Two passes, one before the ranks agree and one after. Both compute v = bucket + residual for themselves: writing it down
// would cost more than reading the residual twice.
#include "common.h"
#include "random.h"
#include "threads.h"

// Adding and subtracting 1.5 * 2^23 rounds to the nearest even integer, whose low byte is the sum's low byte.
constexpr float kRound = 12582912.0f;

namespace {

struct Shape {
    const int64_t* segments;
    int64_t segment_count, block;
};

}  // namespace

// Calls body(segment, index in the segment, index in the bucket, size, block) for blocks begin..end-1 of the bucket.
template <class Body>
FXCOMP_INLINE void for_blocks(const Shape& shape, int64_t begin, int64_t end, const Body& body) {
    int64_t block = 0, start = 0;
    for (int64_t s = 0; s < shape.segment_count && block < end; ++s) {
        const int64_t size = shape.segments[s], blocks = ceil_divide(size, shape.block);
        const int64_t last = std::min(end - block, blocks);
        for (int64_t b = std::max<int64_t>(begin - block, 0); b < last; ++b) {
            const int64_t first = b * shape.block;
            body(s, first, start + first, std::min(shape.block, size - first), block + b);
        }
        block += blocks;
        start += size;
    }
}

template <bool kFeedback>
FXCOMP_INLINE float largest_of(const float* FXCOMP_RESTRICT bucket, const float* FXCOMP_RESTRICT residual,
                               int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        largest = std::max(largest, magnitude_bits(compensated<kFeedback>(bucket, residual, i)));
    }
    return float_of(std::min(largest, kInfinityBits));
}

template <bool kFeedback>
FXCOMP_INLINE void propose_all(const float* bucket, const float* residual, const Shape& shape, float* out,
                               int64_t begin, int64_t end) {
    for_blocks(shape, begin, end, [&](int64_t, int64_t, int64_t at, int64_t size, int64_t block) FXCOMP_LAMBDA {
        out[block] = largest_of<kFeedback>(bucket + at, kFeedback ? residual + at : nullptr, size);
    });
}

FXCOMP_BODY void propose(const float* bucket, const float* residual, const Shape& shape, float* out, int64_t begin,
                         int64_t end) {
    if (residual != nullptr) {
        propose_all<true>(bucket, residual, shape, out, begin, end);
    } else {
        propose_all<false>(bucket, residual, shape, out, begin, end);
    }
}

template <bool kFeedback, bool kStochastic>
FXCOMP_INLINE void encode_block(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                                int8_t* FXCOMP_RESTRICT codes, int64_t size, float agreed, float levels, Stream stream,
                                uint32_t counter) {
    if (magnitude_bits(agreed) >= kInfinityBits) {
        std::memset(codes, 0, static_cast<size_t>(size));
        return;
    }
    const float scale = std::min(agreed / levels, most_scale(levels));
    const float divisor = scale > 0.0f ? scale : 1.0f;
    for (int64_t i = 0; i < size; ++i) {
        const float value = compensated<kFeedback>(bucket, residual, i);
        float quotient = value / divisor;
        quotient = quotient < -levels ? -levels : quotient;
        quotient = quotient > levels ? levels : quotient;
        float code = (quotient + kRound) - kRound;
        if (kStochastic) {
            const float above = quotient - code;
            const float chance = uniform(stream, counter + static_cast<uint32_t>(i));
            code += chance < above ? 1.0f : 0.0f;
            code -= chance < -above ? 1.0f : 0.0f;
        }
        codes[i] = static_cast<int8_t>(bits_of(code + kRound));
        if (kFeedback) residual[i] = value - code * scale;
    }
}

template <bool kFeedback, bool kStochastic>
FXCOMP_INLINE void encode_all(const float* bucket, float* residual, int8_t* codes, const Shape& shape, float levels,
                              const int64_t* state, const float* agreed, int64_t begin, int64_t end) {
    for_blocks(shape, begin, end, [&](int64_t s, int64_t first, int64_t at, int64_t size, int64_t block) FXCOMP_LAMBDA {
        const Stream stream = kStochastic ? stream_of(state + 2 * s) : Stream{0, 0};
        encode_block<kFeedback, kStochastic>(bucket + at, kFeedback ? residual + at : nullptr, codes + at, size,
                                             agreed[block], levels, stream, static_cast<uint32_t>(first));
    });
}

FXCOMP_BODY void encode(const float* bucket, float* residual, int8_t* codes, const Shape& shape, float levels,
                        const int64_t* state, const float* agreed, int64_t begin, int64_t end) {
    if (residual != nullptr && state != nullptr) {
        encode_all<true, true>(bucket, residual, codes, shape, levels, state, agreed, begin, end);
    } else if (residual != nullptr) {
        encode_all<true, false>(bucket, residual, codes, shape, levels, state, agreed, begin, end);
    } else if (state != nullptr) {
        encode_all<false, true>(bucket, residual, codes, shape, levels, state, agreed, begin, end);
    } else {
        encode_all<false, false>(bucket, residual, codes, shape, levels, state, agreed, begin, end);
    }
}

FXCOMP_INLINE void decode_tile(const int8_t* FXCOMP_RESTRICT codes, int64_t ranks, int64_t elements, float scale,
                               float factor, float* FXCOMP_RESTRICT out, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = static_cast<float>(codes[i]) * scale;
    if (ranks == 1) return;
    for (int64_t rank = 1; rank < ranks; ++rank) {
        const int8_t* FXCOMP_RESTRICT code = codes + rank * elements;
        for (int64_t i = 0; i < size; ++i) out[i] += static_cast<float>(code[i]) * scale;
    }
    for (int64_t i = 0; i < size; ++i) out[i] *= factor;
}

FXCOMP_BODY void decode(const int8_t* payloads, int64_t ranks, int64_t elements, const Shape& shape, float levels,
                        const float* agreed, float* out, int64_t begin, int64_t end) {
    const float factor = mean_factor(ranks);
    for_blocks(shape, begin, end, [&](int64_t, int64_t, int64_t at, int64_t size, int64_t block) FXCOMP_LAMBDA {
        const bool is_finite = magnitude_bits(agreed[block]) < kInfinityBits;
        const float scale = is_finite ? std::min(agreed[block] / levels, most_scale(levels)) : float_of(kNanBits);
        for (int64_t start = 0; start < size; start += kTile) {
            decode_tile(payloads + at + start, ranks, elements, scale, factor, out + at + start,
                        std::min(kTile, size - start));
        }
    });
}

FXCOMP_EXPORT void fxcomp_shared_int8_propose(const float* bucket, const float* residual, const int64_t*, float* out,
                                              const int64_t* segments, int64_t segment_count, int64_t block,
                                              int64_t) {
    const Shape shape{segments, segment_count, block};
    in_parallel(count_blocks(segments, segment_count, block), kGrain / block,
                [=](int64_t begin, int64_t end) { widest<propose>(bucket, residual, shape, out, begin, end); });
}

FXCOMP_EXPORT void fxcomp_shared_int8_encode(const float* bucket, float* residual, int8_t* codes, int64_t* state,
                                             const float* agreed, const int64_t* segments, int64_t segment_count,
                                             int64_t block, int64_t levels) {
    const Shape shape{segments, segment_count, block};
    in_parallel(count_blocks(segments, segment_count, block), kGrain / block, [=](int64_t begin, int64_t end) {
        widest<encode>(bucket, residual, codes, shape, static_cast<float>(levels), state, agreed, begin, end);
    });
    if (state != nullptr) raise_steps(state, segment_count);
}

FXCOMP_EXPORT int32_t fxcomp_shared_int8_decode(const int8_t* payloads, int64_t ranks, float* out,
                                                const float* agreed, const int64_t*, const int64_t* segments,
                                                int64_t segment_count, int64_t block, int64_t levels) {
    const Shape shape{segments, segment_count, block};
    const int64_t elements = count_values(segments, segment_count);
    in_parallel(count_blocks(segments, segment_count, block), kGrain / (block * ranks), [=](int64_t begin, int64_t end) {
        widest<decode>(payloads, ranks, elements, shape, static_cast<float>(levels), agreed, out, begin, end);
    });
    return 1;
}
