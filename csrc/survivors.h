// Collect what reaches a threshold and send it: fxcomp/compressors/survivors.py has the rules and the layout.
//
// One pass writes the new residual and collects; what follows touches survivors only. Large segments are cut among
// threads, each collects a range, and the ranges are put together in order.
#pragma once

#include <utility>

#include "selection.h"

namespace survivors {

using namespace selection;

struct Scratch {
    std::vector<Found> parts;
    Found memory;  // of a search in a sample
    std::vector<float> sample;
    std::vector<double> products;
};

struct Sent {
    int64_t reached;
    bool is_finite;  // no survivor is NaN or infinite
};

FXCOMP_INLINE float value_at(const float* bucket, const float* residual, int64_t i) {
    return residual == nullptr ? bucket[i] : bucket[i] + residual[i];
}

// At least 1: zeros reach no threshold.
inline uint32_t kth_largest(const float* values, int64_t count, int64_t k, Found& memory) {
    return k > count ? 1u : std::max(widest<select_largest>(values, count, k, memory).bits, 1u);
}

FXCOMP_BODY void collect_and_clear(const float* bucket, float* residual, int64_t begin, int64_t end,
                                   uint32_t threshold, Found* found) {
    if (residual != nullptr) {
        collect<true, true>(bucket, residual, begin, end, threshold, *found);
    } else {
        collect<false, true>(bucket, residual, begin, end, threshold, *found);
    }
}

// Calls body(begin, end, found) for ranges of a segment, and returns all that was found, in order.
template <class Body>
inline Found& in_ranges(int64_t size, Scratch& scratch, const Body& body) {
    const int64_t parts = parts_of(size);
    if (static_cast<int64_t>(scratch.parts.size()) < parts) scratch.parts.resize(static_cast<size_t>(parts));
    for_parts(parts, [&](int64_t part) {
        Found& found = scratch.parts[static_cast<size_t>(part)];
        found.count = 0;
        body(size * part / parts, size * (part + 1) / parts, &found);
    });
    for (int64_t part = 1; part < parts; ++part) scratch.parts[0].append(scratch.parts[static_cast<size_t>(part)]);
    return scratch.parts[0];
}

// Fills the payload of a segment; what has no slot goes back into the residual.
template <int kForm>
FXCOMP_INLINE Sent fill_with_places(Found& found, const Segment& segment, const PlacesLayout& layout) {
    const int64_t slots = segment.slots;
    float* const residual = segment.residual;
    uint8_t* const values = segment.payload + 4;
    uint8_t* const places = values + 4 * slots;
    std::memset(places + layout.low_bytes, 0, static_cast<size_t>(round_up(layout.bytes(), 4) - layout.low_bytes));
    PlacesWriter<kForm> writer(places, layout, 0);
    Largest cut{0, 0};
    if (found.count > slots) cut = select_largest(found.values.data(), found.count, slots, found);
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

FXCOMP_BODY Sent fill_payload(Found* found, const Segment* segment) {
    const PlacesLayout layout = places_layout(segment->size, segment->slots);
    return with_form(layout, [&](auto form) FXCOMP_LAMBDA {
        return fill_with_places<decltype(form)::value>(*found, *segment, layout);
    });
}

// Sends what reaches a magnitude's bit pattern.
inline Sent send(const Segment& segment, uint32_t bits, Scratch& scratch) {
    Found* const found = &in_ranges(segment.size, scratch, [=](int64_t begin, int64_t end, Found* part) {
        widest<collect_and_clear>(segment.bucket, segment.residual, begin, end, bits, part);
    });
    return widest<fill_payload>(found, &segment);
}

// Calls body(index, segment, scratch) for each segment that is not empty.
template <class Body>
inline void encode_segments(const Segment& bucket, const int64_t* segments, const int64_t* ks, const int64_t* slots,
                            int64_t segment_count, const Body& body) {
    for_each_segment(bucket, segments, ks, slots, segment_count, 4, [&](int64_t index, const Segment& segment) {
        static thread_local Scratch scratch;
        body(index, segment, scratch);
    });
}

FXCOMP_BODY void gather(const float* bucket, const float* residual, int64_t start, int64_t stride, float* out,
                        int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = value_at(bucket, residual, start + i * stride);
}

// The magnitude that the share k / n of every stride-th value reaches.
inline uint32_t thin_threshold(const Segment& segment, int64_t stride, uint32_t random, Scratch& scratch) {
    const int64_t n = segment.size;
    const int64_t start = std::min<int64_t>(random % stride, n - 1);
    const int64_t count = ceil_divide(n - start, stride);
    if (static_cast<int64_t>(scratch.sample.size()) < count) scratch.sample.resize(static_cast<size_t>(count));
    float* const sample = scratch.sample.data();
    in_parallel(count, kGrain / 16, [&segment, start, stride, sample](int64_t begin, int64_t end) {
        widest<gather>(segment.bucket, segment.residual, start, stride, sample, begin, end);
    });
    return kth_largest(sample, count, std::max<int64_t>(1, (2 * segment.k * count + n) / (2 * n)), scratch.memory);
}

}  // namespace survivors
