// Decode what survived a threshold: fxcomp/compressors/survivors.py has the layout.
//
// Takes all ranks tile by tile, in rank order, and writes the mean once. Places ascend, so a range of tiles finds where
// it begins in each payload by bisection.
#include <atomic>
#include <vector>

#include "common.h"
#include "threads.h"

namespace {

struct Section {
    const uint8_t* payloads;  // the segment's section in the first rank's payload
    int64_t ranks, payload_bytes, slots;

    const uint8_t* of(int64_t rank) const { return payloads + rank * payload_bytes; }
};

}  // namespace

FXCOMP_INLINE int32_t load_int(const uint8_t* from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// How many of `count` ascending places lie before `place`.
FXCOMP_INLINE int64_t count_before(const uint8_t* places, int64_t count, int64_t place) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (load_int(places + 4 * middle) < place) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Returns false if a place lies outside its tile, which happens only if they do not ascend.
FXCOMP_BODY bool decode(const Section* section, float* out, int64_t begin, int64_t end, int64_t* next) {
    const float factor = mean_factor(section->ranks);
    for (int64_t rank = 0; rank < section->ranks; ++rank) {
        const uint8_t* payload = section->of(rank);
        next[rank] = count_before(payload + 4 + 4 * section->slots, load_int(payload), begin);
    }
    for (int64_t start = begin; start < end; start += 4 * kTile) {
        const int64_t size = std::min(4 * kTile, end - start);
        float* const tile = out + start;
        std::memset(tile, 0, static_cast<size_t>(size) * sizeof(float));
        for (int64_t rank = 0; rank < section->ranks; ++rank) {
            const uint8_t* payload = section->of(rank);
            const uint8_t* const values = payload + 4;
            const uint8_t* const places = values + 4 * section->slots;
            const int64_t count = load_int(payload);
            int64_t at = next[rank];
            for (; at < count; ++at) {
                const int64_t place = load_int(places + 4 * at);
                if (place >= start + size) break;
                if (place < start) return false;
                tile[place - start] += load_float(values + 4 * at);
            }
            next[rank] = at;
        }
        if (section->ranks > 1) {
            for (int64_t i = 0; i < size; ++i) tile[i] *= factor;
        }
    }
    return true;
}

// Returns 0 if a count or a place cannot be: that payload is not one of ours.
FXCOMP_EXPORT int32_t fxcomp_survivors_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                              const int64_t* slots, int64_t segment_count, float* out) {
    int64_t payload_bytes = 0;
    for (int64_t s = 0; s < segment_count; ++s) payload_bytes += segments[s] > 0 ? 4 + 8 * slots[s] : 0;
    std::atomic<bool> is_ours{true};
    for (int64_t s = 0; s < segment_count; ++s) {
        const int64_t n = segments[s];
        if (n == 0) continue;
        const Section section{payloads, ranks, payload_bytes, slots[s]};
        for (int64_t rank = 0; rank < ranks; ++rank) {
            const uint8_t* payload = section.of(rank);
            const int64_t count = load_int(payload);
            if (count < 0 || count > slots[s]) return 0;
            if (count > 0 && load_int(payload + 4 * (slots[s] + count)) >= n) return 0;
        }
        in_parallel(ceil_divide(n, 4 * kTile), kGrain / (4 * kTile), [&](int64_t begin, int64_t end) {
            static thread_local std::vector<int64_t> next;
            next.resize(static_cast<size_t>(ranks));
            if (!decode(&section, out, 4 * kTile * begin, std::min(4 * kTile * end, n), next.data())) is_ours = false;
        });
        out += n;
        payloads += 4 + 8 * slots[s];
    }
    return is_ours ? 1 : 0;
}
