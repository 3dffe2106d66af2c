// The value of largest magnitude of each chunk: fxcomp/compressors/chunkmax.py has the formulas and the layout.
//
// One pass over a tile of chunks computes v and the new residual; the search for the largest reads v again from the
// first-level cache, once for the largest magnitude and once for its place, both without branches; four short chunks are
// searched side by side. Decode takes all ranks tile by tile and writes the mean once.
#include <atomic>

#include "common.h"
#include "threads.h"

namespace {

constexpr int kSideBySide = 4;
constexpr int64_t kShort = 48;  // up to here chunks side by side are faster than one after the other

// One segment's part of the payload.
struct Layout {
    int64_t n, chunk, chunks;

    int64_t place_bytes() const { return chunk <= 256 ? 1 : 2; }
    int64_t bytes() const { return 4 * chunks + round_up(chunks * place_bytes(), 4); }
};

struct Largest {
    uint32_t bits;
    float value;
    int64_t place;
};

}  // namespace

FXCOMP_INLINE Layout layout_of(int64_t n, int64_t chunk) { return {n, chunk, ceil_divide(n, chunk)}; }

// v of up to a tile; the residual takes what is finite.
template <bool kFeedback>
FXCOMP_INLINE void compensate(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                              float* FXCOMP_RESTRICT values, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
        const float value = compensated<kFeedback>(bucket, residual, i);
        values[i] = value;
        if (kFeedback) residual[i] = magnitude_bits(value) < kInfinityBits ? value : residual[i];
    }
}

FXCOMP_INLINE Largest find_largest(const float* values, int64_t values_size) {
    const auto size = static_cast<int32_t>(values_size);
    int32_t bits = 0, behind = 0;  // behind: how many values lie from the first of the largest on
    for (int32_t i = 0; i < size; ++i) bits = std::max(bits, static_cast<int32_t>(magnitude_bits(values[i])));
    for (int32_t i = 0; i < size; ++i) {
        const int32_t is_largest = -static_cast<int32_t>(static_cast<int32_t>(magnitude_bits(values[i])) == bits);
        behind = std::max(behind, is_largest & (size - i));
    }
    return {static_cast<uint32_t>(bits), values[size - behind], size - behind};
}

// The same for four short chunks that lie one behind the other, side by side: a vector would be longer than a chunk.
FXCOMP_INLINE void find_largest_of_four(const float* values, int32_t chunk, Largest* found) {
    const float* const other[] = {values, values + chunk, values + 2 * chunk, values + 3 * chunk};
    uint64_t keys[] = {0, 0, 0, 0};  // a magnitude, and how many values lie from it on
    for (int32_t place = 0; place < chunk; ++place) {
        const auto behind = static_cast<uint64_t>(chunk - place);
        for (int lane = 0; lane < kSideBySide; ++lane) {
            keys[lane] = std::max(keys[lane], static_cast<uint64_t>(magnitude_bits(other[lane][place])) << 32 | behind);
        }
    }
    for (int lane = 0; lane < kSideBySide; ++lane) {
        const auto place = chunk - static_cast<int32_t>(keys[lane] & 0xFFFFFFFF);
        found[lane] = {static_cast<uint32_t>(keys[lane] >> 32), other[lane][place], place};
    }
}

template <bool kFeedback>
FXCOMP_INLINE void put(const Layout& layout, int64_t number, const Largest& largest, float* residual,
                       uint8_t* payload) {
    store_float(payload + 4 * number, largest.value);
    uint8_t* const places = payload + 4 * layout.chunks;
    if (layout.place_bytes() == 1) {
        places[number] = static_cast<uint8_t>(largest.place);
    } else {
        const auto place = static_cast<uint16_t>(largest.place);
        std::memcpy(places + 2 * number, &place, 2);
    }
    if (kFeedback && largest.bits < kInfinityBits) residual[number * layout.chunk + largest.place] = 0.0f;
}

// Chunks begin..end-1 of a segment.
template <bool kFeedback>
FXCOMP_INLINE void encode_chunks(const float* bucket, float* residual, uint8_t* payload, const Layout& layout,
                                 int64_t begin, int64_t end) {
    alignas(64) float values[kTile];
    const int64_t chunk = layout.chunk, together = std::max<int64_t>(kTile / chunk, 1);
    for (int64_t first = begin; first < end; first += together) {
        const int64_t start = first * chunk, last = std::min(first + together, end);
        const int64_t stop = std::min(last * chunk, layout.n);
        Largest largest{0, 0.0f, 0};
        for (int64_t from = start; from < stop; from += kTile) {
            const int64_t size = std::min(kTile, stop - from);
            compensate<kFeedback>(bucket + from, kFeedback ? residual + from : nullptr, values, size);
            if (chunk > kTile) {  // this tile is a part of one chunk
                const Largest here = find_largest(values, size);
                if (from == start || here.bits > largest.bits) largest = {here.bits, here.value, from - start + here.place};
            }
        }
        if (chunk > kTile) {
            put<kFeedback>(layout, first, largest, residual, payload);
            continue;
        }
        int64_t number = first;
        for (; chunk <= kShort && number + kSideBySide <= last && (number + kSideBySide) * chunk <= stop;
             number += kSideBySide) {
            Largest found[kSideBySide];
            find_largest_of_four(values + number * chunk - start, static_cast<int32_t>(chunk), found);
            for (int64_t i = 0; i < kSideBySide; ++i) put<kFeedback>(layout, number + i, found[i], residual, payload);
        }
        for (; number < last; ++number) {
            const int64_t at = number * chunk - start;
            put<kFeedback>(layout, number, find_largest(values + at, std::min(chunk, stop - start - at)), residual, payload);
        }
    }
    if (end == layout.chunks) {
        const int64_t bytes = layout.chunks * layout.place_bytes();
        fill_up(payload + 4 * layout.chunks + bytes, bytes);
    }
}

// Chunks begin..end-1 of all segments.
FXCOMP_BODY void encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                        int64_t segment_count, int64_t chunk, int64_t begin, int64_t end) {
    int64_t before = 0;
    for (int64_t s = 0; s < segment_count && before < end; ++s) {
        const Layout layout = layout_of(segments[s], chunk);
        const int64_t from = std::max(begin - before, int64_t{0}), to = std::min(end - before, layout.chunks);
        if (from < to && residual != nullptr) encode_chunks<true>(bucket, residual, payload, layout, from, to);
        if (from < to && residual == nullptr) encode_chunks<false>(bucket, nullptr, payload, layout, from, to);
        before += layout.chunks;
        bucket += layout.n;
        if (residual != nullptr) residual += layout.n;
        payload += layout.bytes();
    }
}

// False if a place lies outside its chunk.
FXCOMP_INLINE bool decode_chunks(const uint8_t* payloads, int64_t ranks, int64_t stride, const Layout& layout, float* out,
                                 int64_t begin, int64_t end) {
    const int64_t chunk = layout.chunk, together = std::max<int64_t>(4 * kTile / chunk, 1);
    const float factor = mean_factor(ranks);
    for (int64_t first = begin; first < end; first += together) {
        const int64_t last = std::min(first + together, end);
        const int64_t start = first * chunk, size = std::min(last * chunk, layout.n) - start;
        float* const tile = out + start;
        std::memset(tile, 0, static_cast<size_t>(size) * sizeof(float));
        for (int64_t rank = 0; rank < ranks; ++rank) {
            const uint8_t* const values = payloads + rank * stride;
            const uint8_t* const places = values + 4 * layout.chunks;
            for (int64_t number = first; number < last; ++number) {
                uint16_t place = 0;
                if (layout.place_bytes() == 1) {
                    place = places[number];
                } else {
                    std::memcpy(&place, places + 2 * number, 2);
                }
                const int64_t at = (number - first) * chunk + place;
                if (place >= chunk || at >= size) return false;
                tile[at] += load_float(values + 4 * number);
            }
        }
        if (ranks > 1) {
            for (int64_t i = 0; i < size; ++i) tile[i] *= factor;
        }
    }
    return true;
}

FXCOMP_BODY bool decode(const uint8_t* payloads, int64_t ranks, int64_t stride, const int64_t* segments,
                        int64_t segment_count, int64_t chunk, float* out, int64_t begin, int64_t end) {
    int64_t before = 0;
    for (int64_t s = 0; s < segment_count && before < end; ++s) {
        const Layout layout = layout_of(segments[s], chunk);
        const int64_t from = std::max(begin - before, int64_t{0}), to = std::min(end - before, layout.chunks);
        if (from < to && !decode_chunks(payloads, ranks, stride, layout, out, from, to)) return false;
        before += layout.chunks;
        out += layout.n;
        payloads += layout.bytes();
    }
    return true;
}

FXCOMP_EXPORT void fxcomp_chunkmax_encode(const float* bucket, float* residual, uint8_t* payload, const void*,
                                          const void*, const int64_t* segments, int64_t segment_count, int64_t chunk) {
    in_parallel(count_blocks(segments, segment_count, chunk), kGrain / chunk, [=](int64_t begin, int64_t end) {
        widest<encode>(bucket, residual, payload, segments, segment_count, chunk, begin, end);
    });
}

// Returns 0 if a place lies outside its chunk: that payload is not one of ours.
FXCOMP_EXPORT int32_t fxcomp_chunkmax_decode(const uint8_t* payloads, int64_t ranks, float* out, const void*,
                                             const void*, const int64_t* segments, int64_t segment_count,
                                             int64_t chunk) {
    int64_t stride = 0;
    for (int64_t s = 0; s < segment_count; ++s) stride += layout_of(segments[s], chunk).bytes();
    std::atomic<bool> is_ours{true};
    in_parallel(count_blocks(segments, segment_count, chunk), kGrain / chunk, [&](int64_t begin, int64_t end) {
        if (!widest<decode>(payloads, ranks, stride, segments, segment_count, chunk, out, begin, end)) {
            is_ours.store(false);
        }
    });
    return is_ours.load() ? 1 : 0;
}
