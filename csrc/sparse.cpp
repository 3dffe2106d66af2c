// Decode values and their places: fxcomp/compressors/topk.py and survivors.py have the layouts, which differ in a count.
//
// Takes all ranks tile by tile, in rank order, and writes the mean once. A range of tiles finds where it begins in each
// payload by counting the bits before it.
#include <atomic>
#include <vector>

#include "common.h"
#include "places.h"
#include "threads.h"

namespace {

constexpr int64_t kWide = 4 * kTile;

// Of one segment, in the payloads of all ranks.
struct Section {
    const uint8_t* payloads;
    int64_t ranks, stride, n, slots, header_bytes;
    PlacesLayout layout;

    const uint8_t* values(int64_t rank) const { return payloads + rank * stride + header_bytes; }

    const uint8_t* places(int64_t rank) const { return values(rank) + 4 * slots; }

    int64_t sent(int64_t rank) const {
        if (header_bytes == 0) return slots;
        int32_t count;
        std::memcpy(&count, payloads + rank * stride, sizeof count);
        return count;
    }
};

int64_t section_bytes(int64_t slots, const PlacesLayout& layout, int64_t header_bytes) {
    return slots == 0 ? 0 : header_bytes + 4 * slots + round_up(layout.bytes(), 4);
}

}  // namespace

// Decodes values begin..end-1 of a segment, which begins at tile `begin`; false if a count or a place cannot be.
template <int kForm>
FXCOMP_INLINE bool decode_range(const Section& section, float* out, int64_t begin, int64_t end,
                                std::vector<PlacesCursor>& cursors) {
    const float factor = mean_factor(section.ranks);
    for (int64_t rank = 0; rank < section.ranks; ++rank) {
        const int64_t sent = section.sent(rank);
        if (sent < 0 || sent > section.slots) return false;
        cursors[static_cast<size_t>(rank)] =
            PlacesReader<kForm>(section.places(rank), section.layout, sent).find(begin);
    }
    for (int64_t start = begin; start < end; start += kWide) {
        const int64_t size = std::min(kWide, end - start);
        float* const tile = out + start;
        std::memset(tile, 0, static_cast<size_t>(size) * sizeof(float));
        for (int64_t rank = 0; rank < section.ranks; ++rank) {
            const uint8_t* const values = section.values(rank);
            const PlacesReader<kForm> reader(section.places(rank), section.layout, section.sent(rank));
            PlacesCursor cursor = cursors[static_cast<size_t>(rank)];
            while (reader.seek(cursor)) {
                const int64_t place = reader.place(cursor);
                if (place >= start + size) break;
                if (place < start) return false;
                tile[place - start] += load_float(values + 4 * cursor.number);
                reader.advance(cursor);
            }
            cursors[static_cast<size_t>(rank)] = cursor;
        }
        if (section.ranks > 1) {
            for (int64_t i = 0; i < size; ++i) tile[i] *= factor;
        }
    }
    if (end < section.n) return true;
    for (int64_t rank = 0; rank < section.ranks; ++rank) {
        const PlacesReader<kForm> reader(section.places(rank), section.layout, section.sent(rank));
        PlacesCursor cursor = cursors[static_cast<size_t>(rank)];
        if (cursor.number != section.sent(rank) || reader.seek_one(cursor)) return false;
    }
    return true;
}

FXCOMP_BODY bool decode(const uint8_t* payloads, int64_t ranks, int64_t stride, int64_t header_bytes,
                        const int64_t* segments, const int64_t* slots, int64_t segment_count, float* out, int64_t begin,
                        int64_t end) {
    static thread_local std::vector<PlacesCursor> cursors;
    if (static_cast<int64_t>(cursors.size()) < ranks) cursors.resize(static_cast<size_t>(ranks));
    int64_t start = 0;
    for (int64_t s = 0; s < segment_count && start < end; ++s) {
        const int64_t n = segments[s];
        const Section section{payloads, ranks, stride, n, slots[s], header_bytes, places_layout(n, slots[s])};
        // At whole tiles: the cut, and so the number of threads, does not decide which order of places is refused.
        const auto cut = [n](int64_t at) FXCOMP_LAMBDA { return std::min(round_up(at, kWide), n); };
        const int64_t from = cut(std::max(begin, start) - start), to = cut(std::min(end, start + n) - start);
        if (from < to) {
            const bool is_ours = with_form(section.layout, [&](auto form) FXCOMP_LAMBDA {
                return decode_range<decltype(form)::value>(section, out + start, from, to, cursors);
            });
            if (!is_ours) return false;
        }
        start += n;
        payloads += section_bytes(slots[s], section.layout, header_bytes);
    }
    return true;
}

static int32_t decode_all(const uint8_t* payloads, int64_t ranks, int64_t header_bytes, const int64_t* segments,
                          const int64_t* slots, int64_t segment_count, float* out) {
    int64_t stride = 0;
    for (int64_t s = 0; s < segment_count; ++s) {
        stride += section_bytes(slots[s], places_layout(segments[s], slots[s]), header_bytes);
    }
    std::atomic<bool> is_ours{true};
    in_parallel(count_values(segments, segment_count), kGrain, [&](int64_t begin, int64_t end) {
        if (!widest<decode>(payloads, ranks, stride, header_bytes, segments, slots, segment_count, out, begin, end)) {
            is_ours.store(false);
        }
    });
    return is_ours.load() ? 1 : 0;
}

// Both return 0 if a count or a place cannot be: that payload is not one of ours.
FXCOMP_EXPORT int32_t fxcomp_topk_decode(const uint8_t* payloads, int64_t ranks, float* out, const void*, const void*,
                                         const int64_t* segments, const int64_t* ks, int64_t segment_count) {
    return decode_all(payloads, ranks, 0, segments, ks, segment_count, out);
}

FXCOMP_EXPORT int32_t fxcomp_sidco_decode(const uint8_t* payloads, int64_t ranks, float* out, const void*, const void*,
                                          const int64_t* segments, const int64_t*, const int64_t* slots,
                                          int64_t segment_count) {
    return decode_all(payloads, ranks, 4, segments, slots, segment_count, out);
}
