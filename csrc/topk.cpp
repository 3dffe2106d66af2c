// The k values of largest magnitude: fxcomp/compressors/topk.py has the formulas and the layout.
//
// 1. naive: sort everything, O(n log n).
// 2. radix select over all values: a histogram pass, a pass to collect, about 1 ns an element.
// 3. (here) guess a low threshold from a sample, write the new residual and collect the candidates above the guess in
//    one pass, then select among the candidates only. A bad guess costs a histogram of all values and a second pass,
//    never exactness. Where fewer than k values are not zero, all of them are candidates, and the first zeros follow
//    from their places.
//
// Small segments are shared among threads. A large one is cut into parts: each collects, counts its candidates and
// sends what is above the threshold that they found together.
#include <cmath>
#include <mutex>

#include "selection.h"

namespace {

using namespace selection;

constexpr int64_t kLargestSample = 16384;
constexpr int64_t kSmallestStride = 32;
constexpr int64_t kLeastKept = 1 << 17;  // candidates: 1.5 MB

// A thread's share of a segment.
struct Part {
    Found found;
    int64_t histogram[kBins];
    int64_t above, first, sent, ties;
};

// The memory of one thread, kept from call to call.
struct Scratch {
    std::vector<Part> parts;
    Found again;  // only after a bad guess
    Found keys;

    void give_back(int64_t most) {
        for (Part& part : parts) part.found.give_back(most);
        again.give_back(most);
        keys.give_back(most);
    }
};

}  // namespace

// A magnitude that probably somewhat more than k of the n values reach; above zero, and reached by all not finite.
template <bool kFeedback>
FXCOMP_INLINE uint32_t guess_threshold(const float* bucket, const float* residual, int64_t n, int64_t k,
                                       Found& memory) {
    if (n <= kFew) return 1;
    // An odd stride does not fall into step with the rows of a matrix.
    const int64_t stride = std::max(n / kLargestSample, kSmallestStride) | 1;
    const int64_t size = ceil_divide(n, stride);
    memory.count = 0;
    memory.make_room(size);
    float* const sample = memory.values.data();
    for (int64_t i = 0; i < size; ++i) sample[i] = compensated<kFeedback>(bucket, residual, i * stride);
    const double expected = static_cast<double>(size) * static_cast<double>(k) / static_cast<double>(n);
    const int64_t rank = static_cast<int64_t>(1.05 * expected + 4.0 * std::sqrt(expected)) + 4;
    return rank >= size ? 1 : std::clamp(select_largest(sample, size, rank, memory).bits, 1u, kInfinityBits);
}

// Writes what is above the threshold, and the first ties, to places `first`.. of the payload, until `sent` are sent.
template <bool kFeedback, int kForm>
FXCOMP_INLINE PlacesWriter<kForm> send(const float* values, const int32_t* places, Largest threshold, float* residual,
                                       const Segment& segment, const PlacesLayout& layout, int64_t first,
                                       int64_t sent) {
    PlacesWriter<kForm> writer(segment.payload + 4 * segment.k, layout, first);
    uint8_t* const payload = segment.payload;
    for (int64_t i = 0; writer.next < first + sent; ++i) {
        const uint32_t bits = magnitude_bits(values[i]);
        const bool is_tie = bits == threshold.bits;
        const bool is_sent = (bits > threshold.bits) | (is_tie & (threshold.ties > 0));
        threshold.ties -= is_tie;
        // Without a branch: what is not sent is overwritten by the next.
        store_float(payload + 4 * writer.next, values[i]);
        writer.write(places[i], is_sent);
        if (kFeedback) {
            float& left_out = residual[places[i]];
            left_out = (is_sent & (bits < kInfinityBits)) ? 0.0f : left_out;
        }
    }
    return writer;
}

FXCOMP_INLINE void clear_bits(const Segment& segment, const PlacesLayout& layout) {
    uint8_t* const bits = segment.payload + 4 * segment.k + layout.low_bytes;
    std::memset(bits, 0, static_cast<size_t>(round_up(layout.bytes(), 4) - layout.low_bytes));
}

FXCOMP_INLINE bool has_non_finite(const Found& list) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < list.count; ++i) largest = std::max(largest, magnitude_bits(list.values[static_cast<size_t>(i)]));
    return largest >= kInfinityBits;
}

// Sends all of a list of fewer than k values, and the first zeros among the others, which are all zero.
template <bool kFeedback, int kForm>
FXCOMP_INLINE PlacesWriter<kForm> send_with_zeros(const Found& list, const float* compensated_values, float* residual,
                                                  const Segment& segment, const PlacesLayout& layout) {
    PlacesWriter<kForm> writer(segment.payload + 4 * segment.k, layout, 0);
    const float* const values = list.values.data();
    const int32_t* const places = list.places.data();
    int64_t next = 0, zeros = segment.k - list.count;
    for (int64_t place = 0; writer.next < segment.k; ++place) {
        if (zeros == 0) place = places[next];
        const bool is_listed = next < list.count && places[next] == place;
        const float value = is_listed ? values[next] : compensated_values[place];
        store_float(segment.payload + 4 * writer.next, value);
        writer.write(static_cast<int32_t>(place), true);
        if (kFeedback && magnitude_bits(value) < kInfinityBits) residual[place] = 0.0f;
        next += is_listed;
        zeros -= !is_listed;
    }
    return writer;
}

// A threshold that at least k values reach, by a histogram of all. They are where the first pass left them; what is not
// finite is in the list alone.
FXCOMP_INLINE uint32_t exact_threshold(const float* compensated_values, const Found& list, const Segment& segment) {
    int64_t even[kBins] = {}, odd[kBins] = {};  // two, as neighbours often share a bin
    const auto bin_of = [&](int64_t i) FXCOMP_LAMBDA { return magnitude_bits(compensated_values[i]) >> kBinShift; };
    for (int64_t i = 0; i + 1 < segment.size; i += 2) {
        ++even[bin_of(i)];
        ++odd[bin_of(i + 1)];
    }
    if (segment.size % 2 != 0) ++even[bin_of(segment.size - 1)];
    for (size_t i = 0; i < static_cast<size_t>(list.count); ++i) {
        if (magnitude_bits(list.values[i]) < kInfinityBits) continue;
        --odd[bin_of(list.places[i])];
        ++odd[magnitude_bits(list.values[i]) >> kBinShift];
    }
    for (int64_t bin = 0; bin < kBins; ++bin) even[bin] += odd[bin];
    int64_t left = segment.k;
    return std::max(find_bin(even, left) << kBinShift, 1u);
}

// Collects again from the threshold on, and takes what is not finite from the first list, as the residual lacks it.
template <bool kFeedback>
FXCOMP_INLINE void collect_again(const Found& list, const float* values, const Segment& segment, Found& all) {
    const uint32_t threshold = exact_threshold(values, list, segment);
    all.count = 0;
    collect<false, false>(values, nullptr, 0, segment.size, threshold, all);
    if (!kFeedback || !has_non_finite(list)) return;
    Found both;
    size_t i = 0;
    for (size_t j = 0; j < static_cast<size_t>(list.count); ++j) {
        if (magnitude_bits(list.values[j]) < kInfinityBits) continue;
        for (; i < static_cast<size_t>(all.count) && all.places[i] < list.places[j]; ++i) {
            both.append(all.values[i], all.places[i]);
        }
        both.append(list.values[j], list.places[j]);
        i += i < static_cast<size_t>(all.count) && all.places[i] == list.places[j];
    }
    for (; i < static_cast<size_t>(all.count); ++i) both.append(all.values[i], all.places[i]);
    std::swap(both, all);
}

// Sends the k largest, from a list of all that reached the guess.
template <bool kFeedback>
FXCOMP_INLINE void send_from(Found& found, uint32_t guess, const Segment& segment, Scratch& scratch) {
    const PlacesLayout layout = places_layout(segment.size, segment.k);
    const float* const values = kFeedback ? segment.residual : segment.bucket;
    const bool is_bad = found.count < segment.k && guess > 1;
    if (is_bad) collect_again<kFeedback>(found, values, segment, scratch.again);
    Found& list = is_bad ? scratch.again : found;
    clear_bits(segment, layout);
    with_form(layout, [&](auto form) FXCOMP_LAMBDA {
        constexpr int kForm = decltype(form)::value;
        if (list.count < segment.k) {
            send_with_zeros<kFeedback, kForm>(list, values, segment.residual, segment, layout).finish();
            return;
        }
        const Largest threshold = select_largest(list.values.data(), list.count, segment.k, list);
        send<kFeedback, kForm>(list.values.data(), list.places.data(), threshold, segment.residual, segment, layout, 0,
                               segment.k).finish();
    });
}

FXCOMP_BODY uint32_t guess_of(const Segment& segment, Found& memory) {
    if (segment.residual == nullptr) {
        return guess_threshold<false>(segment.bucket, nullptr, segment.size, segment.k, memory);
    }
    return guess_threshold<true>(segment.bucket, segment.residual, segment.size, segment.k, memory);
}

FXCOMP_BODY void collect_part(const Segment& segment, uint32_t guess, int64_t begin, int64_t end, Part& part) {
    part.found.count = 0;
    if (segment.residual != nullptr) {
        collect<true, false>(segment.bucket, segment.residual, begin, end, guess, part.found);
    } else {
        collect<false, false>(segment.bucket, nullptr, begin, end, guess, part.found);
    }
}

FXCOMP_BODY void send_alone(const Segment& segment, uint32_t guess, Found& found, Scratch& scratch) {
    if (segment.residual != nullptr) {
        send_from<true>(found, guess, segment, scratch);
    } else {
        send_from<false>(found, guess, segment, scratch);
    }
}

FXCOMP_BODY void count_part(Part& part) { count_bins(part.found.values.data(), part.found.count, part.histogram); }

FXCOMP_BODY void take_part(Part& part, uint32_t bin) {
    Found& found = part.found;
    part.above = 0;
    part.sent = take_bin(found.values.data(), found.count, bin, found.room_for_keys(found.count + 1), part.above);
}

FXCOMP_BODY void send_part(const Segment& segment, uint32_t bits, const Part& part, std::mutex& turn) {
    if (part.sent == 0) return;
    const PlacesLayout layout = places_layout(segment.size, segment.k);
    with_form(layout, [&](auto form) FXCOMP_LAMBDA {
        constexpr int kForm = decltype(form)::value;
        const float* const values = part.found.values.data();
        const int32_t* const places = part.found.places.data();
        const Largest largest{bits, part.ties};
        const auto writer = segment.residual != nullptr ? send<true, kForm>(values, places, largest, segment.residual,
                                                                            segment, layout, part.first, part.sent)
                                                        : send<false, kForm>(values, places, largest, nullptr, segment,
                                                                             layout, part.first, part.sent);
        const std::lock_guard<std::mutex> mine(turn);  // two parts may share a byte
        writer.finish();
    });
}

// The k-th largest of what the parts collected, and what each of them sends.
static uint32_t share_out(const Segment& segment, Part* parts, int64_t part_count, Found& memory) {
    for_parts(part_count, [&](int64_t p) { widest<count_part>(parts[p]); });
    int64_t histogram[kBins] = {}, left = segment.k, taken = 0;
    for (int64_t p = 0; p < part_count; ++p) {
        for (int64_t bin = 0; bin < kBins; ++bin) histogram[bin] += parts[p].histogram[bin];
    }
    const uint32_t bin = find_bin(histogram, left);
    for_parts(part_count, [&](int64_t p) { widest<take_part>(parts[p], bin); });
    uint32_t* const keys = memory.room_for_keys(histogram[bin]);
    for (int64_t p = 0; p < part_count; taken += parts[p++].sent) {
        std::copy_n(parts[p].found.keys.data(), parts[p].sent, keys + taken);
    }
    const Largest largest = select_of_keys(keys, taken, left);
    int64_t first = 0, ties = largest.ties;
    for (int64_t p = 0; p < part_count; ++p) {
        Part& part = parts[p];
        const uint32_t* const own = part.found.keys.data();
        const int64_t equal = std::count(own, own + part.sent, largest.bits);
        part.above += std::count_if(own, own + part.sent, [&](uint32_t key) { return key > largest.bits; });
        part.ties = std::min(ties, equal);
        part.first = first;
        part.sent = part.above + part.ties;
        first += part.sent;
        ties -= part.ties;
    }
    return largest.bits;
}

static void encode(const Segment& segment, Scratch& scratch) {
    const int64_t part_count = parts_of(segment.size), size = segment.size;
    if (static_cast<int64_t>(scratch.parts.size()) < part_count) scratch.parts.resize(static_cast<size_t>(part_count));
    Part* const parts = scratch.parts.data();
    const uint32_t guess = widest<guess_of>(segment, parts[0].found);
    for_parts(part_count, [&](int64_t p) {
        widest<collect_part>(segment, guess, size * p / part_count, size * (p + 1) / part_count, parts[p]);
    });
    int64_t count = 0;
    for (int64_t p = 0; p < part_count; ++p) count += parts[p].found.count;
    if (part_count == 1 || count < segment.k) {
        for (int64_t p = 1; p < part_count; ++p) parts[0].found.append(parts[p].found);
        widest<send_alone>(segment, guess, parts[0].found, scratch);
        return;
    }
    const uint32_t bits = share_out(segment, parts, part_count, scratch.keys);
    clear_bits(segment, places_layout(segment.size, segment.k));
    std::mutex turn;
    for_parts(part_count, [&](int64_t p) { widest<send_part>(segment, bits, parts[p], turn); });
}

FXCOMP_EXPORT void fxcomp_topk_encode(const float* bucket, float* residual, uint8_t* payload, const void*, const void*,
                                      const int64_t* segments, const int64_t* ks, int64_t segment_count) {
    // A bad guess, or many values of one magnitude, takes far more memory than is needed otherwise.
    const int64_t most = kLeastKept + 8 * count_values(ks, segment_count);
    for_each_segment({bucket, residual, payload, 0, 0, 0}, segments, ks, ks, segment_count, 0,
                     [most](int64_t, const Segment& segment) {
                         static thread_local Scratch scratch;
                         encode(segment, scratch);
                         scratch.give_back(most);
                     });
}
