// Place and sign of the largest of each chunk, one scale a segment: fxcomp/compressors/cmax.py has the formulas.
//
// A scale needs all of its segment, so encode reads it twice: the first pass finds places, signs and sums and packs the
// codes, the second writes the residual. Where a segment and its residual outgrow the caches, 20 bytes a value pass
// through main memory instead of 12, and encoding comes to two thirds of a copy's rate; up to some 2^20 values it comes
// to 0.8. (Going back from the segment's end, which the caches still hold, is slower, and so is fetching ahead by hand:
// processors fetch ahead forwards.) Small segments are shared among threads; a large one shares its own work.
//
// The largest of a chunk is found in rounds: of each pair of neighbours the larger stays, and its place gets a bit. All
// pairs of a tile are compared side by side, whatever the chunk is. Decode takes all ranks tile by tile. It clears a
// tile at once, which makes the processor write lines that it has not read: that is faster than stream.h.
#include <atomic>
#include <vector>

#include "planes.h"

namespace {

constexpr int64_t kRunChunks = 1024;  // whose largest are summed in one go
constexpr uint32_t kNoCode = 256;     // a code has eight bits at most

// One segment and its part of the payload.
struct Segment {
    const float* bucket;
    float* residual;
    uint8_t* payload;
    int64_t n, chunk;

    int64_t chunks() const { return ceil_divide(n, chunk); }
    int64_t runs() const { return ceil_divide(n, chunk * kRunChunks); }
};

// All segments, for decode, and a payload's size.
struct Shape {
    const int64_t* segments;
    int64_t segment_count, chunk, payload_bytes;
};

// What a run of chunks brings to the scale: chunks of zeros do not count.
struct Run {
    float sum;
    int64_t count;
};

// The largest of each chunk of a tile, and its place.
struct Found {
    alignas(64) uint32_t bits[2][kMostChunks];
    alignas(64) uint32_t places[2][kMostChunks];
    int now;
};

}  // namespace

// What a code stands for.
FXCOMP_INLINE float value_of(uint32_t code, float scale, uint32_t place_bits) {
    return float_of(magnitude_bits(scale) | (code >> place_bits) << 31);
}

// The code that means nothing under a scale.
FXCOMP_INLINE uint32_t nothing_of(float scale, int64_t chunk) {
    const auto unused = static_cast<uint32_t>(31 - place_bits_of(chunk));
    return bits_of(scale) >> 31 != 0 ? (magnitude_bits(scale) * 2654435769u) >> unused : kNoCode;
}

// Of each pair of neighbours the larger, of equal ones the left; its place gets the next bit.
template <bool kFirst>
FXCOMP_INLINE void keep_larger(const uint32_t* FXCOMP_RESTRICT bits, const uint32_t* FXCOMP_RESTRICT places,
                               uint32_t* FXCOMP_RESTRICT larger, uint32_t* FXCOMP_RESTRICT larger_places,
                               int64_t pairs, uint32_t shift) {
    for (int64_t i = 0; i < pairs; ++i) {  // without branches, or GCC would not vectorise it
        const uint32_t left = bits[2 * i], right = bits[2 * i + 1];
        // Signed, for AVX2 compares nothing else; a magnitude is below 2^31.
        const bool is_right = static_cast<int32_t>(right & 0x7fffffffu) > static_cast<int32_t>(left & 0x7fffffffu);
        const uint32_t is_right_mask = 0u - static_cast<uint32_t>(is_right);
        const uint32_t place = kFirst ? 0u : places[2 * i], other = kFirst ? 1u : places[2 * i + 1] | 1u << shift;
        larger[i] = left ^ ((left ^ right) & is_right_mask);
        larger_places[i] = place ^ ((place ^ other) & is_right_mask);
    }
}

FXCOMP_INLINE void find_largest(const uint32_t* tile, int64_t chunk, Found& found) {
    int64_t pairs = kTile / 2;
    keep_larger<true>(tile, nullptr, found.bits[0], found.places[0], pairs, 0);
    found.now = 0;
    for (uint32_t shift = 1; (int64_t{1} << shift) < chunk; ++shift) {
        pairs /= 2;
        const int from = found.now, to = 1 - from;
        keep_larger<false>(found.bits[from], found.places[from], found.bits[to], found.places[to], pairs, shift);
        found.now = to;
    }
}

// v, and zeros up to a whole tile.
template <bool kFeedback>
FXCOMP_INLINE void load_tile(const float* FXCOMP_RESTRICT bucket, const float* FXCOMP_RESTRICT residual,
                             uint32_t* FXCOMP_RESTRICT tile, int64_t size) {
    for (int64_t i = 0; i < size; ++i) tile[i] = bits_of(compensated<kFeedback>(bucket, residual, i));
    for (int64_t i = size; i < kTile; ++i) tile[i] = 0;
}

// Adds the magnitudes of a tile's largest to the lanes of their places in the run; returns how many are not zero.
FXCOMP_INLINE int64_t add_to_lanes(const uint32_t* FXCOMP_RESTRICT bits, int64_t count, float* FXCOMP_RESTRICT lanes,
                                   int64_t first_lane) {
    int64_t sent = 0;
    for (int64_t start = 0; start < count; start += kLanes) {
        const int64_t size = std::min(kLanes, count - start);
        for (int64_t i = 0; i < size; ++i) lanes[first_lane + i] += float_of(bits[start + i] & 0x7fffffffu);
    }
    for (int64_t i = 0; i < count; ++i) sent += float_of(bits[i]) != 0.0f;
    return sent;
}

// The first pass over a run.
template <bool kFeedback>
FXCOMP_INLINE Run encode_run(const Segment& segment, int64_t run) {
    const int64_t n = segment.n, chunk = segment.chunk, chunks = segment.chunks(), in_tile = kTile / chunk;
    const auto place_bits = static_cast<uint32_t>(place_bits_of(chunk));
    const int64_t stop = std::min(n, (run + 1) * kRunChunks * chunk);
    alignas(64) uint32_t tile[kTile];
    alignas(64) uint8_t codes[kMostChunks];
    alignas(64) float lanes[kLanes] = {};
    Found found;
    int64_t sent = 0;
    for (int64_t start = run * kRunChunks * chunk; start < stop; start += kTile) {
        const int64_t first = start / chunk, count = std::min(in_tile, chunks - first);
        const float* const residual = kFeedback ? segment.residual + start : nullptr;
        if (n - start >= kTile) {
            load_tile<kFeedback>(segment.bucket + start, residual, tile, kTile);
        } else {
            load_tile<kFeedback>(segment.bucket + start, residual, tile, n - start);
        }
        find_largest(tile, chunk, found);
        const uint32_t* const bits = found.bits[found.now];
        const uint32_t* const places = found.places[found.now];
        for (int64_t i = 0; i < in_tile; ++i) {
            codes[i] = static_cast<uint8_t>(places[i] | ((bits[i] >> 31) << place_bits));
        }
        sent += add_to_lanes(bits, count, lanes, first % kLanes);
        write_codes(codes, segment.payload + 4, chunks, chunk, first, count);
    }
    return {fold<kLanes / 2>(lanes), sent};
}

FXCOMP_BODY void encode_runs(const Segment& segment, Run* runs, int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
        runs[run] = segment.residual != nullptr ? encode_run<true>(segment, run) : encode_run<false>(segment, run);
    }
}

#if defined(__GNUC__)
template <int kChunk>
struct Vectors;
template <>
struct Vectors<8> {
    typedef float Floats __attribute__((vector_size(32)));
    typedef int32_t Words __attribute__((vector_size(32)));
};
template <>
struct Vectors<16> {
    typedef float Floats __attribute__((vector_size(64)));
    typedef int32_t Words __attribute__((vector_size(64)));
};

// Takes what was sent out of the residual. A chunk is a vector, or a few where the processor has shorter ones: one place
// after the other waits for the stores of its whole chunk, and takes 1.1 to 1.3 times as long.  (measured, Zen 4, 2026-11)
template <int kChunk>
FXCOMP_INLINE void take_out(const uint8_t* codes, float scale, const float* FXCOMP_RESTRICT bucket,
                            float* FXCOMP_RESTRICT residual, int64_t count) {
    using Floats = typename Vectors<kChunk>::Floats;
    using Words = typename Vectors<kChunk>::Words;
    const auto place_bits = static_cast<uint32_t>(place_bits_of(kChunk));
    Words places;
    for (int j = 0; j < kChunk; ++j) places[j] = j;
    for (int64_t i = 0; i < count; ++i) {
        const auto place = static_cast<int32_t>(codes[i] & (kChunk - 1));
        const auto sent = static_cast<int32_t>(bits_of(value_of(codes[i], scale, place_bits)));
        Floats value, left_out;
        std::memcpy(&value, bucket + i * kChunk, sizeof value);
        std::memcpy(&left_out, residual + i * kChunk, sizeof left_out);
        left_out = (value + left_out) - reinterpret_cast<Floats>((places == place) & sent);
        std::memcpy(residual + i * kChunk, &left_out, sizeof left_out);
    }
}
#endif

// The second pass over a tile: what is sent leaves the residual, and chunks of zeros get the code that means nothing.
template <bool kFeedback>
FXCOMP_INLINE void leave_out_tile(const Segment& segment, float scale, uint32_t nothing, int64_t first) {
    const int64_t chunk = segment.chunk, chunks = segment.chunks(), start = first * chunk;
    const int64_t count = std::min(kTile / chunk, chunks - first), size = std::min(kTile, segment.n - start);
    const auto place_bits = static_cast<uint32_t>(place_bits_of(chunk));
    const float* FXCOMP_RESTRICT const bucket = segment.bucket + start;
    float* FXCOMP_RESTRICT const residual = kFeedback ? segment.residual + start : nullptr;
    alignas(64) uint8_t codes[kMostChunks];
    read_codes(segment.payload + 4, chunks, chunk, first, count, codes);
#if defined(__GNUC__)
    if (kFeedback && nothing == kNoCode && size == count * chunk && (chunk == 8 || chunk == 16)) {
        return chunk == 8 ? take_out<8>(codes, scale, bucket, residual, count)
                          : take_out<16>(codes, scale, bucket, residual, count);
    }
#endif
    if (kFeedback) {
        for (int64_t i = 0; i < size; ++i) residual[i] = bucket[i] + residual[i];
    }
    const auto mask = static_cast<uint32_t>(chunk - 1);
    if (nothing == kNoCode) {
        for (int64_t i = 0; kFeedback && i < count; ++i) {
            residual[i * chunk + (codes[i] & mask)] -= value_of(codes[i], scale, place_bits);
        }
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t at = i * chunk + (codes[i] & mask);
        const float value = kFeedback ? residual[at] : bucket[at];
        if (value == 0.0f || codes[i] == nothing) {
            codes[i] = static_cast<uint8_t>(nothing);
        } else if (kFeedback) {
            residual[at] = value - value_of(codes[i], scale, place_bits);
        }
    }
    write_codes(codes, segment.payload + 4, chunks, chunk, first, count);
}

FXCOMP_BODY void leave_out_runs(const Segment& segment, float scale, uint32_t nothing, int64_t begin, int64_t end) {
    const int64_t in_tile = kTile / segment.chunk, stop = std::min(segment.chunks(), end * kRunChunks);
    for (int64_t first = begin * kRunChunks; first < stop; first += in_tile) {
        if (segment.residual != nullptr) {
            leave_out_tile<true>(segment, scale, nothing, first);
        } else {
            leave_out_tile<false>(segment, scale, nothing, first);
        }
    }
}

// The scale of a segment, its sign set where chunks of zeros ask for a code that means nothing.
static float scale_of(const Segment& segment, const std::vector<Run>& runs) {
    float lanes[kLanes] = {};
    int64_t sent = 0;
    for (int64_t run = 0; run < segment.runs(); ++run) {
        lanes[run % kLanes] += runs[static_cast<size_t>(run)].sum;
        sent += runs[static_cast<size_t>(run)].count;
    }
    const float scale = fold<kLanes / 2>(lanes) / static_cast<float>(std::max<int64_t>(sent, 1));
    if (magnitude_bits(scale) >= kInfinityBits) return float_of(kNanBits);
    return sent < segment.chunks() ? -scale : scale;
}

static void encode_segment(const Segment& segment) {
    static thread_local std::vector<Run> memory;
    const int64_t count = segment.runs(), grain = kGrain / (kRunChunks * segment.chunk);
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(static_cast<size_t>(count));
    Run* const runs = memory.data();
    in_parallel(count, grain, [&segment, runs](int64_t begin, int64_t end) {
        widest<encode_runs>(segment, runs, begin, end);
    });
    const float scale = scale_of(segment, memory);
    uint8_t* const codes = segment.payload + 4;
    const int64_t code_bytes = bytes_of_codes(segment.chunks(), segment.chunk);
    store_float(segment.payload, scale);
    fill_up(codes + code_bytes, code_bytes);
    if (magnitude_bits(scale) >= kInfinityBits) {
        std::memset(codes, 0, static_cast<size_t>(code_bytes));
        return;
    }
    const uint32_t nothing = nothing_of(scale, segment.chunk);
    if (segment.residual == nullptr && nothing == kNoCode) return;
    const float size = float_of(magnitude_bits(scale));
    in_parallel(count, grain, [&segment, size, nothing](int64_t begin, int64_t end) {
        widest<leave_out_runs>(segment, size, nothing, begin, end);
    });
}

FXCOMP_EXPORT void fxcomp_cmax_encode(const float* bucket, float* residual, uint8_t* payload, const void*, const void*,
                                      const int64_t* segments, int64_t segment_count, int64_t chunk) {
    const int64_t total = count_values(segments, segment_count), threads = thread_budget();
    const auto each = [&](int64_t begin, int64_t end, bool are_small) {
        Segment segment{bucket, residual, payload, 0, chunk};
        for (int64_t s = 0; s < end; ++s) {
            segment.n = segments[s];
            const bool is_small = threads == 1 || segment.n * threads <= total;
            if (s >= begin && segment.n > 0 && is_small == are_small) encode_segment(segment);
            segment.bucket += segment.n;
            if (residual != nullptr) segment.residual += segment.n;
            segment.payload += bytes_of(segment.n, chunk);
        }
    };
    const int64_t grain = total > 0 ? ceil_divide(segment_count * kGrain, total) : segment_count;
    in_parallel(segment_count, grain, [&](int64_t begin, int64_t end) { each(begin, end, true); });
    if (threads > 1) each(0, segment_count, false);
}

// One rank's values of a tile, added. False if a place lies outside the segment.
FXCOMP_INLINE bool add_rank(const uint8_t* payload, int64_t n, int64_t chunk, int64_t first, float* out, int64_t size) {
    const int64_t chunks = ceil_divide(n, chunk), count = std::min(kTile / chunk, chunks - first);
    const auto place_bits = static_cast<uint32_t>(place_bits_of(chunk));
    const float scale = load_float(payload);
    if (magnitude_bits(scale) >= kInfinityBits) {
        for (int64_t i = 0; i < size; ++i) out[i] += float_of(kNanBits);
        return true;
    }
    const uint32_t nothing = nothing_of(scale, chunk), mask = static_cast<uint32_t>(chunk - 1);
    alignas(64) uint8_t codes[kMostChunks];
    read_codes(payload + 4, chunks, chunk, first, count, codes);
    const bool is_outside = (count - 1) * chunk + (codes[count - 1] & mask) >= size;
    if (is_outside && codes[count - 1] != nothing) return false;
    for (int64_t i = 0; i < count - is_outside; ++i) {
        const float value = value_of(codes[i], scale, place_bits);
        out[i * chunk + (codes[i] & mask)] += codes[i] == nothing ? 0.0f : value;
    }
    return true;
}

// Tiles begin..end-1 of all segments.
FXCOMP_BODY bool decode_tiles(const Shape& shape, const uint8_t* payloads, int64_t ranks, float* out, int64_t begin,
                              int64_t end) {
    const float factor = mean_factor(ranks);
    const int64_t chunk = shape.chunk;
    int64_t before = 0;
    for (int64_t s = 0; s < shape.segment_count && before < end; ++s) {
        const int64_t n = shape.segments[s], tiles = ceil_divide(n, kTile), stop = std::min(end - before, tiles);
        for (int64_t tile = std::max(begin - before, int64_t{0}); tile < stop; ++tile) {
            const int64_t start = tile * kTile, size = std::min(kTile, n - start);
            float* const values = out + start;
            std::memset(values, 0, static_cast<size_t>(size) * sizeof(float));
            for (int64_t rank = 0; rank < ranks; ++rank) {
                const uint8_t* const payload = payloads + rank * shape.payload_bytes;
                if (!add_rank(payload, n, chunk, start / chunk, values, size)) return false;
            }
            if (ranks > 1) {
                for (int64_t i = 0; i < size; ++i) values[i] *= factor;
            }
        }
        before += tiles;
        out += n;
        payloads += bytes_of(n, chunk);
    }
    return true;
}

// Returns 0 if a place lies outside its segment: that payload is not one of ours.
FXCOMP_EXPORT int32_t fxcomp_cmax_decode(const uint8_t* payloads, int64_t ranks, float* out, const void*, const void*,
                                         const int64_t* segments, int64_t segment_count, int64_t chunk) {
    Shape shape{segments, segment_count, chunk, 0};
    for (int64_t s = 0; s < segment_count; ++s) shape.payload_bytes += bytes_of(segments[s], chunk);
    std::atomic<bool> is_ours{true};
    in_parallel(count_blocks(segments, segment_count, kTile), kGrain / kTile / ranks, [&](int64_t begin, int64_t end) {
        if (!widest<decode_tiles>(shape, payloads, ranks, out, begin, end)) is_ours.store(false);
    });
    return is_ours.load() ? 1 : 0;
}
