// Values at random places that all ranks draw alike: fxcomp/compressors/randomk.py has the formulas and the layout.
//
// Encode and decode go along the circle, that is along each segment from the place where the circle begins to the end,
// then from its start. So a tile of values knows its runs by a division, and threads cut the circle anywhere. Encode is
// one pass: a tile's runs are sent first, its residual is written, and what was sent is taken out of it again while it
// is in the cache. Two multiplications and two divisions a run of 16 draw the places.
#include <mutex>
#include <vector>

#include "common.h"
#include "random.h"
#include "threads.h"

namespace {

constexpr int64_t kPlaces = 16;  // in a run
constexpr int64_t kMostRuns = kTile / kPlaces + 2;  // that touch a tile

// One segment's places at one step.
struct Drawing {
    int64_t n, k, turn;
    Stream stream;

    int64_t stratum(int64_t number) const { return number * n / k; }
};

// Places begin..begin+size-1 of the circle, which send the values from `number` on.
struct Run {
    int64_t number, begin, size;
};

}  // namespace

FXCOMP_INLINE Drawing drawing_of(int64_t n, int64_t k, const int64_t* state, int64_t steps_back) {
    const int64_t now[] = {state[0], state[1] - steps_back};
    const Stream stream = stream_of(now);
    const int64_t low = random_bits(stream, 0xfffffffeu), high = random_bits(stream, 0xffffffffu);
    return {n, k, (high * n + ((low * n) >> 32)) >> 32, stream};
}

// The runs that touch begin..end-1 of the circle, cut to it; returns how many.
FXCOMP_INLINE int64_t runs_of(const Drawing& drawing, int64_t begin, int64_t end, Run* runs) {
    // The last stratum that starts at or before `begin`.
    int64_t number = (ceil_divide((begin + 1) * drawing.k, drawing.n * kPlaces) - 1) * kPlaces;
    int64_t count = 0;
    for (int64_t from = drawing.stratum(number); from < end && number < drawing.k; number += kPlaces) {
        const int64_t size = std::min(kPlaces, drawing.k - number);
        const int64_t to = drawing.stratum(number + size), room = to - from - size + 1;
        const int64_t bits = random_bits(drawing.stream, static_cast<uint32_t>(number / kPlaces));
        const int64_t first = from + ((bits * room) >> 32);
        const int64_t begins = std::max(first, begin), ends = std::min(first + size, end);
        if (begins < ends) runs[count++] = {number + begins - first, begins, ends - begins};
        from = to;
    }
    return count;
}

// Whether any of up to a tile of values is not finite; the residual takes those that are.
template <bool kFeedback>
FXCOMP_INLINE bool update_residual(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual, int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) {
        const float value = compensated<kFeedback>(bucket, residual, i);
        const uint32_t bits = magnitude_bits(value);
        largest = std::max(largest, bits);
        if (kFeedback) residual[i] = bits < kInfinityBits ? value : residual[i];
    }
    return largest >= kInfinityBits;
}

// Encodes begin..end-1 of the circle, which are neighbours in memory: bucket[0] is place `begin`.
template <bool kFeedback>
FXCOMP_INLINE bool encode_stretch(const Drawing& drawing, const float* bucket, float* residual, float* payload,
                                  float factor, int64_t begin, int64_t end) {
    Run runs[kMostRuns];
    float left_out[kTile];
    bool is_bad = false;
    for (int64_t start = begin; start < end; start += kTile) {
        const int64_t stop = std::min(start + kTile, end);
        const int64_t count = runs_of(drawing, start, stop, runs);
        float* left = left_out;
        for (int64_t r = 0; r < count; ++r) {
            for (int64_t i = 0; i < runs[r].size; ++i) {
                const int64_t at = runs[r].begin - begin + i;
                const float value = compensated<kFeedback>(bucket, residual, at);
                const float sent = value * factor;
                payload[runs[r].number + i] = sent;
                if (kFeedback) *left++ = magnitude_bits(sent) < kInfinityBits ? value - sent : residual[at];
            }
        }
        is_bad |= update_residual<kFeedback>(bucket + (start - begin), kFeedback ? residual + (start - begin) : nullptr,
                                             stop - start);
        if (!kFeedback) continue;
        left = left_out;
        for (int64_t r = 0; r < count; ++r) {
            for (int64_t i = 0; i < runs[r].size; ++i) residual[runs[r].begin - begin + i] = *left++;
        }
    }
    return is_bad;
}

// Both stretches of memory that begin..end-1 of a segment's circle cover.
template <bool kFeedback>
FXCOMP_INLINE bool encode_part(const Drawing& drawing, const float* bucket, float* residual, float* payload,
                               float factor, int64_t begin, int64_t end) {
    bool is_bad = false;
    const int64_t wrap = drawing.n - drawing.turn;
    if (begin < wrap) {
        const int64_t at = begin + drawing.turn;
        is_bad |= encode_stretch<kFeedback>(drawing, bucket + at, kFeedback ? residual + at : nullptr, payload, factor,
                                            begin, std::min(end, wrap));
    }
    if (end > wrap) {
        const int64_t from = std::max(begin, wrap), at = from - wrap;
        is_bad |= encode_stretch<kFeedback>(drawing, bucket + at, kFeedback ? residual + at : nullptr, payload, factor,
                                            from, end);
    }
    return is_bad;
}

FXCOMP_BODY bool encode(const Drawing& drawing, const float* bucket, float* residual, float* payload, float factor,
                        int64_t begin, int64_t end) {
    return residual != nullptr ? encode_part<true>(drawing, bucket, residual, payload, factor, begin, end)
                               : encode_part<false>(drawing, bucket, nullptr, payload, factor, begin, end);
}

FXCOMP_INLINE void decode_stretch(const Drawing& drawing, const float* payloads, int64_t ranks, int64_t stride,
                                  float mean, float* out, int64_t begin, int64_t end) {
    Run runs[kMostRuns];
    for (int64_t start = begin; start < end; start += kTile) {
        const int64_t stop = std::min(start + kTile, end);
        std::memset(out + (start - begin), 0, static_cast<size_t>(stop - start) * sizeof(float));
        const int64_t count = runs_of(drawing, start, stop, runs);
        for (int64_t r = 0; r < count; ++r) {
            float* const to = out + (runs[r].begin - begin);
            const float* const from = payloads + runs[r].number;
            for (int64_t i = 0; i < runs[r].size; ++i) {
                float sum = from[i];
                for (int64_t rank = 1; rank < ranks; ++rank) sum += from[rank * stride + i];
                to[i] = sum * mean;
            }
        }
    }
}

FXCOMP_BODY void decode(const Drawing& drawing, const float* payloads, int64_t ranks, int64_t stride, float mean,
                        float* out, int64_t begin, int64_t end) {
    const int64_t wrap = drawing.n - drawing.turn;
    if (begin < wrap) {
        decode_stretch(drawing, payloads, ranks, stride, mean, out + begin + drawing.turn, begin, std::min(end, wrap));
    }
    if (end > wrap) {
        const int64_t from = std::max(begin, wrap);
        decode_stretch(drawing, payloads, ranks, stride, mean, out + (from - wrap), from, end);
    }
}

// Calls body(segment, begin, end, bucket_start, payload_start) for what begin..end-1 of all segments' circles cover.
template <class Body>
static void in_segments(const int64_t* segments, const int64_t* counts, int64_t segment_count, int64_t begin,
                        int64_t end, const Body& body) {
    int64_t start = 0, payload_start = 0;
    for (int64_t s = 0; s < segment_count && start < end; ++s) {
        const int64_t from = std::max(begin - start, int64_t{0}), to = std::min(end - start, segments[s]);
        if (from < to) body(s, from, to, start, payload_start);
        start += segments[s];
        payload_start += counts[s] > 0 ? counts[s] + 1 : 0;
    }
}

FXCOMP_EXPORT void fxcomp_randomk_encode(const float* bucket, float* residual, float* payload, int64_t* state, const void*,
                                         const int64_t* segments, const int64_t* counts, int64_t segment_count,
                                         int64_t is_scaled) {
    const int64_t elements = count_values(segments, segment_count);
    // The first value of a segment's residual stays where anything in the segment is not finite.
    static thread_local std::vector<float> first_residuals;
    first_residuals.resize(static_cast<size_t>(segment_count));
    in_segments(segments, counts, segment_count, 0, elements,
                [&](int64_t s, int64_t, int64_t, int64_t start, int64_t payload_start) {
                    if (residual != nullptr) first_residuals[static_cast<size_t>(s)] = residual[start];
                    payload[payload_start + counts[s]] = 0.0f;
                });
    std::mutex flags;
    in_parallel(elements, kGrain, [&](int64_t begin, int64_t end) {
        in_segments(segments, counts, segment_count, begin, end,
                    [&](int64_t s, int64_t from, int64_t to, int64_t start, int64_t payload_start) {
                        const int64_t n = segments[s], k = counts[s];
                        const Drawing drawing = drawing_of(n, k, state + 2 * s, 0);
                        const double scale = static_cast<double>(n) / static_cast<double>(k);
                        const float factor = is_scaled != 0 ? static_cast<float>(scale) : 1.0f;
                        float* const left_out = residual != nullptr ? residual + start : nullptr;
                        float* const sent = payload + payload_start;
                        if (!widest<encode>(drawing, bucket + start, left_out, sent, factor, from, to)) return;
                        const std::lock_guard<std::mutex> mine(flags);
                        payload[payload_start + k] = float_of(kNanBits);
                    });
    });
    in_segments(segments, counts, segment_count, 0, elements,
                [&](int64_t s, int64_t, int64_t, int64_t start, int64_t payload_start) {
                    const bool is_bad = magnitude_bits(payload[payload_start + counts[s]]) >= kInfinityBits;
                    if (is_bad && residual != nullptr) residual[start] = first_residuals[static_cast<size_t>(s)];
                });
    raise_steps(state, segment_count);
}

FXCOMP_EXPORT int32_t fxcomp_randomk_decode(const float* payloads, int64_t ranks, float* out, const void*,
                                            const int64_t* state, const int64_t* segments, const int64_t* counts,
                                            int64_t segment_count, int64_t) {
    const int64_t elements = count_values(segments, segment_count);
    int64_t stride = 0;
    for (int64_t s = 0; s < segment_count; ++s) stride += counts[s] > 0 ? counts[s] + 1 : 0;
    in_parallel(elements, kGrain, [&](int64_t begin, int64_t end) {
        in_segments(segments, counts, segment_count, begin, end,
                    [&](int64_t s, int64_t from, int64_t to, int64_t start, int64_t payload_start) {
                        const Drawing drawing = drawing_of(segments[s], counts[s], state + 2 * s, 1);
                        widest<decode>(drawing, payloads + payload_start, ranks, stride, mean_factor(ranks),
                                       out + start, from, to);
                    });
    });
    in_segments(segments, counts, segment_count, 0, elements,
                [&](int64_t s, int64_t, int64_t, int64_t start, int64_t payload_start) {
                    for (int64_t rank = 0; rank < ranks; ++rank) {
                        const float flag = payloads[rank * stride + payload_start + counts[s]];
                        if (magnitude_bits(flag) >= kInfinityBits) out[start] = float_of(kNanBits);
                    }
                });
    return 1;
}
