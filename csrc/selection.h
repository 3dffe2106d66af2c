// Collect values from a threshold on with their places, and find the k-th largest: what topk and survivors.h share.
#pragma once

#include <algorithm>
#include <vector>

#include "common.h"
#include "places.h"
#include "threads.h"

namespace selection {

constexpr int64_t kRun = 64;     // values whose flags fill one mask
constexpr int64_t kFew = 512;    // up to here sorting beats a histogram
constexpr int64_t kBins = 2048;  // of the upper 11 bits of a magnitude
constexpr int kBinShift = 20;

// By ascending place. The memory is kept from call to call.
struct Found {
    std::vector<float> values;
    std::vector<int32_t> places;
    std::vector<uint32_t> keys;  // room for `select_largest`
    int64_t count = 0;

    void make_room(int64_t more) {
        if (count + more <= static_cast<int64_t>(values.size())) return;
        values.resize(static_cast<size_t>(2 * (count + more)));
        places.resize(values.size());
    }

    void append(float value, int32_t place) {
        make_room(1);
        values[static_cast<size_t>(count)] = value;
        places[static_cast<size_t>(count++)] = place;
    }

    void append(const Found& other) {
        make_room(other.count);
        std::copy_n(other.values.data(), other.count, values.data() + count);
        std::copy_n(other.places.data(), other.count, places.data() + count);
        count += other.count;
    }

    uint32_t* room_for_keys(int64_t size) {
        if (size > static_cast<int64_t>(keys.size())) keys.resize(static_cast<size_t>(2 * size));
        return keys.data();
    }

    void give_back(int64_t most) {
        if (static_cast<int64_t>(values.size()) > most) *this = Found();
    }
};

// One segment of the bucket, and its part of the payload. At most `slots` values are sent.
struct Segment {
    const float* bucket;
    float* residual;  // or null
    uint8_t* payload;
    int64_t size, k, slots;
};

// The largest values: all above `bits`, and the first `ties` of those equal to it.
struct Largest {
    uint32_t bits;
    int64_t ties;
};

// Takes the lowest bit out of `mask` and appends its value; appends nothing if there is none.
FXCOMP_INLINE void append_lowest(uint64_t& mask, const float* values, int64_t start, float* found_values,
                                 int32_t* found_places, int64_t& count) {
    const int64_t i = count_trailing_zeros(mask) & (kRun - 1);
    found_values[count] = values[i];
    found_places[count] = static_cast<int32_t>(start + i);
    count += mask != 0;
    mask &= mask - 1;
}

// Handles up to 64 values: the found take those from `threshold` on, for which there must be room and two more. The
// residual takes each finite value, or 0 for one that was found, if kClear.
template <bool kFeedback, bool kClear>
FXCOMP_INLINE void collect_run(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual, int64_t start,
                               int64_t size, uint32_t threshold, float* found_values, int32_t* found_places,
                               int64_t& count) {
    alignas(64) float values[kRun];
    alignas(64) uint8_t flags[kRun] = {};
    for (int64_t i = 0; i < size; ++i) values[i] = compensated<kFeedback>(bucket, residual, i);
    for (int64_t i = 0; i < size; ++i) flags[i] = magnitude_bits(values[i]) >= threshold;
    if (kFeedback) {
        for (int64_t i = 0; i < size; ++i) {
            const uint32_t bits = magnitude_bits(values[i]);
            const float left_out = kClear && bits >= threshold ? 0.0f : values[i];
            residual[i] = bits < kInfinityBits ? left_out : residual[i];
        }
    }
    uint64_t mask = 0;
    for (int64_t byte = 0; byte < kRun / 8; ++byte) {
        mask |= static_cast<uint64_t>(pack_eight(flags + 8 * byte)) << (8 * byte);
    }
    // Most runs have none or one: taking two without a branch avoids most mispredictions.
    append_lowest(mask, values, start, found_values, found_places, count);
    append_lowest(mask, values, start, found_values, found_places, count);
    while (mask != 0) append_lowest(mask, values, start, found_values, found_places, count);
}

// Collects from values begin..end-1 of a segment.
template <bool kFeedback, bool kClear>
FXCOMP_INLINE void collect(const float* bucket, float* residual, int64_t begin, int64_t end, uint32_t threshold,
                           Found& found) {
    for (int64_t start = begin; start < end;) {
        found.make_room(kTile + 2);
        float* const values = found.values.data();
        int32_t* const places = found.places.data();
        int64_t count = found.count;
        const int64_t stop = std::min(start + kTile, end);
        for (; start + kRun <= stop; start += kRun) {
            collect_run<kFeedback, kClear>(bucket + start, kFeedback ? residual + start : nullptr, start, kRun,
                                           threshold, values, places, count);
        }
        if (start < stop) {
            collect_run<kFeedback, kClear>(bucket + start, kFeedback ? residual + start : nullptr, start, stop - start,
                                           threshold, values, places, count);
            start = stop;
        }
        found.count = count;
    }
}

// The bin that the k-th largest is in; `left` becomes its number within the bin.
FXCOMP_INLINE uint32_t find_bin(const int64_t* histogram, int64_t& left) {
    uint32_t bin = kBins - 1;
    while (histogram[bin] < left) left -= histogram[bin--];
    return bin;
}

FXCOMP_INLINE void count_bins(const float* values, int64_t count, int64_t* histogram) {
    std::fill_n(histogram, kBins, int64_t{0});
    for (int64_t i = 0; i < count; ++i) ++histogram[magnitude_bits(values[i]) >> kBinShift];
}

// The magnitudes in a bin, with room for one more; returns how many, and counts those above it.
FXCOMP_INLINE int64_t take_bin(const float* values, int64_t count, uint32_t bin, uint32_t* keys, int64_t& above) {
    int64_t taken = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = magnitude_bits(values[i]);
        keys[taken] = bits;
        taken += (bits >> kBinShift) == bin;
        above += (bits >> kBinShift) > bin;
    }
    return taken;
}

inline Largest select_of_keys(uint32_t* keys, int64_t count, int64_t k) {
    std::nth_element(keys, keys + (count - k), keys + count);
    const uint32_t bits = keys[count - k];
    return {bits, std::count(keys + (count - k), keys + count, bits)};
}

// The k-th largest magnitude of count >= k. `memory` lends its room for keys.
FXCOMP_BODY Largest select_largest(const float* values, int64_t count, int64_t k, Found& memory) {
    uint32_t* const keys = memory.room_for_keys(count + 1);
    if (count <= kFew) {
        for (int64_t i = 0; i < count; ++i) keys[i] = magnitude_bits(values[i]);
        return select_of_keys(keys, count, k);
    }
    int64_t histogram[kBins], left = k, above = 0;
    count_bins(values, count, histogram);
    const uint32_t bin = find_bin(histogram, left);
    return select_of_keys(keys, take_bin(values, count, bin, keys, above), left);
}

// So many threads share a segment's own work.
inline int64_t parts_of(int64_t size) { return std::clamp<int64_t>(size / kStagedGrain, 1, thread_budget()); }

// Calls body(index, segment) for each segment that is not empty; a section of the payload begins with `header_bytes`.
// The small ones are shared among threads; one of more than a thread's share of the bucket shares its own work.
template <class Body>
inline void for_each_segment(const Segment& bucket, const int64_t* segments, const int64_t* ks, const int64_t* slots,
                             int64_t segment_count, int64_t header_bytes, const Body& body) {
    const int64_t total = count_values(segments, segment_count), threads = thread_budget();
    const auto each = [&](int64_t begin, int64_t end, bool are_small) {
        Segment segment = bucket;
        for (int64_t s = 0; s < end; ++s) {
            segment.size = segments[s];
            segment.k = ks[s];
            segment.slots = slots[s];
            const bool is_small = threads == 1 || segment.size * threads <= total;
            if (s >= begin && segment.size > 0 && is_small == are_small) body(s, segment);
            segment.bucket += segment.size;
            if (segment.residual != nullptr) segment.residual += segment.size;
            if (segment.slots > 0) {
                const int64_t places = places_layout(segment.size, segment.slots).bytes();
                segment.payload += header_bytes + 4 * segment.slots + round_up(places, 4);
            }
        }
    };
    const int64_t grain = total > 0 ? ceil_divide(segment_count * kGrain, total) : segment_count;
    in_parallel(segment_count, grain, [&](int64_t begin, int64_t end) { each(begin, end, true); });
    if (threads > 1) each(0, segment_count, false);
}

}  // namespace selection
