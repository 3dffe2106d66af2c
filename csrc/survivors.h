// Collect what reaches a threshold and send it: fxcomp/compressors/survivors.py has the rules and the layout.
//
// One pass writes the new residual and collects; what follows touches survivors only. Large segments are cut among
// threads, each collects a range, and the ranges are put together in order.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "collect.h"
#include "common.h"
#include "places.h"
#include "threads.h"

namespace survivors {

// By ascending place. The memory is kept from call to call.
struct Found {
    std::vector<float> values;
    std::vector<int32_t> places;
    int64_t count = 0;

    void make_room(int64_t more) {
        if (count + more > static_cast<int64_t>(values.size())) {
            values.resize(static_cast<size_t>(2 * (count + more)));
            places.resize(values.size());
        }
    }

    void append(const Found& other) {
        make_room(other.count);
        std::copy_n(other.values.data(), other.count, values.data() + count);
        std::copy_n(other.places.data(), other.count, places.data() + count);
        count += other.count;
    }
};

struct Scratch {
    std::vector<Found> parts;
    Found first, merged;  // of two looks
    std::vector<float> sample;
    std::vector<double> products;
};

struct Segment {
    const float* bucket;
    float* residual;  // or null
    uint8_t* payload;
    int64_t size, k, slots;
};

struct Sent {
    int64_t reached;
    bool is_finite;  // no survivor is NaN or infinite
};

// The largest values: all above `bits`, and the first `ties` of those equal to it.
struct Largest {
    uint32_t bits;
    int64_t ties;
};

FXCOMP_INLINE float value_at(const float* bucket, const float* residual, int64_t i) {
    return residual == nullptr ? bucket[i] : bucket[i] + residual[i];
}

constexpr int64_t kFew = 512;  // up to here sorting beats clearing histograms

// The k-th largest of few magnitudes whose bits under the mask are `prefix`.
FXCOMP_INLINE Largest select_of_few(const float* values, int64_t count, int64_t k, uint32_t prefix, uint32_t mask) {
    uint32_t keys[kFew + 1];
    int64_t taken = 0;
    for (int64_t i = 0; i < count; ++i) {
        keys[taken] = magnitude_bits(values[i]);
        taken += (keys[taken] & mask) == prefix;
    }
    std::nth_element(keys, keys + (taken - k), keys + taken);
    const uint32_t bits = keys[taken - k];
    return {bits, std::count(keys + (taken - k), keys + taken, bits)};
}

// The k-th largest magnitude of count >= k, by a histogram for each of three digits of 11, 10 and 10 bits, until few
// are left.
FXCOMP_BODY Largest select(const float* values, int64_t count, int64_t k) {
    if (count <= kFew) return select_of_few(values, count, k, 0, 0);
    uint32_t prefix = 0, prefix_mask = 0;
    int64_t left = k;
    const int shifts[] = {20, 10, 0};
    const int widths[] = {11, 10, 10};
    for (int digit = 0; digit < 3; ++digit) {
        int64_t histogram[2048] = {};
        const uint32_t digit_mask = (1u << widths[digit]) - 1;
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t bits = magnitude_bits(values[i]);
            if ((bits & prefix_mask) == prefix) ++histogram[(bits >> shifts[digit]) & digit_mask];
        }
        uint32_t bin = digit_mask;
        while (histogram[bin] < left) left -= histogram[bin--];
        prefix |= bin << shifts[digit];
        prefix_mask |= digit_mask << shifts[digit];
        if (histogram[bin] <= kFew) return select_of_few(values, count, left, prefix, prefix_mask);
    }
    return {prefix, left};
}

// At least 1: zeros reach no threshold.
inline uint32_t kth_largest(const float* values, int64_t count, int64_t k) {
    return k > count ? 1u : std::max(widest<select>(values, count, k).bits, 1u);
}

// Handles up to 64 values: clears the residual where one survives, keeps it where one is not finite.
template <bool kFeedback>
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
            const float left_out = bits >= threshold ? 0.0f : values[i];
            residual[i] = bits < kInfinityBits ? left_out : residual[i];
        }
    }
    append_flagged(flags, values, start, found_values, found_places, count);
}

template <bool kFeedback>
FXCOMP_INLINE void collect_runs(const float* bucket, float* residual, int64_t begin, int64_t end, uint32_t threshold,
                                Found& found) {
    for (int64_t start = begin; start < end;) {
        found.make_room(kTile + 2);
        float* const values = found.values.data();
        int32_t* const places = found.places.data();
        int64_t count = found.count;
        const int64_t stop = std::min(start + kTile, end);
        for (; start + kRun <= stop; start += kRun) {
            collect_run<kFeedback>(bucket + start, kFeedback ? residual + start : nullptr, start, kRun, threshold,
                                   values, places, count);
        }
        if (start < stop) {
            collect_run<kFeedback>(bucket + start, kFeedback ? residual + start : nullptr, start, stop - start,
                                   threshold, values, places, count);
            start = stop;
        }
        found.count = count;
    }
}

FXCOMP_BODY void collect(const float* bucket, float* residual, int64_t begin, int64_t end, uint32_t threshold,
                         Found* found) {
    if (residual != nullptr) {
        collect_runs<true>(bucket, residual, begin, end, threshold, *found);
    } else {
        collect_runs<false>(bucket, residual, begin, end, threshold, *found);
    }
}

// Collects again from what the first pass left in the residual. It holds v there, 0 where one survived already.
FXCOMP_BODY void collect_left(float* residual, int64_t begin, int64_t end, uint32_t threshold, Found* found) {
    for (int64_t i = begin; i < end; ++i) {
        if (magnitude_bits(residual[i]) < threshold) continue;
        found->make_room(1);
        found->values[static_cast<size_t>(found->count)] = residual[i];
        found->places[static_cast<size_t>(found->count)] = static_cast<int32_t>(i);
        ++found->count;
        residual[i] = 0.0f;
    }
}

// Calls body(begin, end, found) for ranges of a segment, and returns all that was found, in order.
template <class Body>
inline Found& in_ranges(int64_t size, Scratch& scratch, const Body& body) {
    const int64_t parts = std::clamp<int64_t>(size / kStagedGrain, 1, thread_budget());
    if (static_cast<int64_t>(scratch.parts.size()) < parts) scratch.parts.resize(static_cast<size_t>(parts));
    struct Context {
        const Body& body;
        Found* found;
        int64_t size, parts;
    } context{body, scratch.parts.data(), size, parts};
    run_parts(
        parts,
        [](void* raw, int64_t part) {
            const Context& c = *static_cast<Context*>(raw);
            c.found[part].count = 0;
            c.body(c.size * part / c.parts, c.size * (part + 1) / c.parts, &c.found[part]);
        },
        &context);
    for (int64_t part = 1; part < parts; ++part) scratch.parts[0].append(scratch.parts[static_cast<size_t>(part)]);
    return scratch.parts[0];
}

// Puts the second look's survivors among the first's. Where one is not finite, the second look took the old residual
// for v: that goes back.
inline void merge(const Found& first, const Found& second, float* residual, Found& merged) {
    merged.count = 0;
    merged.make_room(first.count + second.count);
    int64_t a = 0, b = 0;
    while (a < first.count || b < second.count) {
        const auto i = static_cast<size_t>(a), j = static_cast<size_t>(b), at = static_cast<size_t>(merged.count);
        if (b == second.count || (a < first.count && first.places[i] < second.places[j])) {
            merged.values[at] = first.values[i];
            merged.places[at] = first.places[i];
            ++a;
        } else if (a < first.count && first.places[i] == second.places[j]) {
            residual[second.places[j]] = second.values[j];
            ++b;
            continue;
        } else {
            merged.values[at] = second.values[j];
            merged.places[at] = second.places[j];
            ++b;
        }
        ++merged.count;
    }
}

// Fills the payload of a segment; what has no slot goes back into the residual.
template <int kForm>
FXCOMP_INLINE Sent fill_with_places(const Found& found, const Segment& segment, const PlacesLayout& layout) {
    const int64_t slots = segment.slots;
    float* const residual = segment.residual;
    uint8_t* const values = segment.payload + 4;
    uint8_t* const places = values + 4 * slots;
    std::memset(places + layout.low_bytes, 0, static_cast<size_t>(round_up(layout.bytes(), 4) - layout.low_bytes));
    PlacesWriter<kForm> writer(places, layout, 0);
    Largest cut{0, 0};
    if (found.count > slots) cut = widest<select>(found.values.data(), found.count, slots);
    uint32_t largest = 0;
    for (int64_t i = 0; i < found.count; ++i) {
        const float value = found.values[static_cast<size_t>(i)];
        const int32_t place = found.places[static_cast<size_t>(i)];
        const uint32_t bits = magnitude_bits(value);
        largest = std::max(largest, bits);
        if (found.count > slots) {
            const bool is_tie = bits == cut.bits;
            const bool is_sent = bits > cut.bits || (is_tie && cut.ties > 0);
            cut.ties -= is_tie;
            if (!is_sent) {
                if (residual != nullptr && bits < kInfinityBits) residual[place] = value;
                continue;
            }
        }
        store_float(values + 4 * writer.next, value);
        writer.write(place, true);
    }
    writer.finish();
    const int64_t sent = writer.next;
    const auto count = static_cast<int32_t>(sent);
    std::memcpy(segment.payload, &count, sizeof count);
    std::memset(values + 4 * sent, 0, static_cast<size_t>(4 * (slots - sent)));
    std::memset(places + kForm / 8 * sent, 0, static_cast<size_t>(kForm / 8 * (slots - sent)));
    return {found.count, largest < kInfinityBits};
}

FXCOMP_BODY Sent fill_payload(const Found* found, const Segment* segment) {
    const PlacesLayout layout = places_layout(segment->size, segment->slots);
    if (layout.form == kBitmap) return fill_with_places<kBitmap>(*found, *segment, layout);
    if (layout.form == 8) return fill_with_places<8>(*found, *segment, layout);
    return fill_with_places<16>(*found, *segment, layout);
}

// Sends what reaches a magnitude's bit pattern; if fewer than k / 2 values do, what reaches second().
template <class Second>
inline Sent send(const Segment& segment, uint32_t bits, Scratch& scratch, const Second& second) {
    const float* const bucket = segment.bucket;
    float* const residual = segment.residual;
    const auto collect_from = [&](uint32_t threshold) -> Found& {
        return in_ranges(segment.size, scratch, [=](int64_t begin, int64_t end, Found* found) {
            widest<collect>(bucket, residual, begin, end, threshold, found);
        });
    };
    Found* found = &collect_from(bits);
    const uint32_t lower = 2 * found->count < segment.k ? second() : bits;
    if (lower < bits) {
        if (residual == nullptr) {
            found = &collect_from(lower);
        } else {
            std::swap(scratch.first, *found);  // the second look writes where the first one did
            const Found& more = in_ranges(segment.size, scratch, [=](int64_t begin, int64_t end, Found* left) {
                widest<collect_left>(residual, begin, end, lower, left);
            });
            merge(scratch.first, more, residual, scratch.merged);
            found = &scratch.merged;
        }
    }
    return widest<fill_payload>(found, &segment);
}

inline Sent send(const Segment& segment, uint32_t bits, Scratch& scratch) {
    return send(segment, bits, scratch, [bits] { return bits; });
}

// Calls body(index, segment, scratch) for each segment that is not empty; many small ones are shared among threads, and
// a large one shares its own work.
template <class Body>
inline void for_each_segment(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                             const int64_t* ks, const int64_t* slots, int64_t segment_count, const Body& body) {
    int64_t total = 0, largest = 0;
    for (int64_t s = 0; s < segment_count; ++s) {
        total += segments[s];
        largest = std::max(largest, segments[s]);
    }
    const bool are_small = largest * thread_budget() <= total;
    const int64_t grain = are_small && total > 0 ? ceil_divide(segment_count * kGrain, total) : segment_count;
    in_parallel(segment_count, grain, [&](int64_t begin, int64_t end) {
        static thread_local Scratch scratch;
        int64_t value = 0, byte = 0;
        for (int64_t s = 0; s < end; ++s) {
            if (s >= begin && segments[s] > 0) {
                const Segment segment{bucket + value,  residual == nullptr ? nullptr : residual + value, payload + byte,
                                      segments[s], ks[s], slots[s]};
                body(s, segment, scratch);
            }
            value += segments[s];
            if (slots[s] > 0) byte += 4 + 4 * slots[s] + round_up(places_layout(segments[s], slots[s]).bytes(), 4);
        }
    });
}

FXCOMP_BODY void gather(const float* bucket, const float* residual, int64_t start, int64_t stride, float* out,
                        int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = value_at(bucket, residual, start + i * stride);
}

// Every stride-th value, from which dgc.py's rule takes thresholds.
struct Sample {
    const float* values;
    int64_t count, reaching;

    uint32_t threshold() const { return kth_largest(values, count, reaching); }
    uint32_t lower_threshold() const { return kth_largest(values, count, 2 * reaching); }
};

inline Sample take_sample(const Segment& segment, int64_t stride, uint32_t random, Scratch& scratch) {
    const int64_t n = segment.size;
    const int64_t start = std::min<int64_t>(random % stride, n - 1);
    const int64_t count = ceil_divide(n - start, stride);
    if (static_cast<int64_t>(scratch.sample.size()) < count) scratch.sample.resize(static_cast<size_t>(count));
    float* const sample = scratch.sample.data();
    in_parallel(count, kGrain / 16, [&segment, start, stride, sample](int64_t begin, int64_t end) {
        widest<gather>(segment.bucket, segment.residual, start, stride, sample, begin, end);
    });
    const int64_t reaching = std::max<int64_t>(1, (2 * segment.k * count + n) / (2 * n));
    return {sample, count, reaching};
}

}  // namespace survivors
