// The k values of largest magnitude: fxcomp/compressors/topk.py has the formulas and the layout.
//
// 1. naive: sort everything, O(n log n).
// 2. radix select over all values: a histogram pass, a pass to collect, about 1 ns an element.
// 3. (here) guess a low threshold from a sample, write the new residual and collect the candidates above the guess in
//    one pass, then radix select among the candidates only. A bad guess costs a histogram of all values and a second
//    pass, never exactness. Where fewer than k values are not zero, all of them are candidates, and the first zeros
//    follow from their places.
//
// Threads cut the bucket, not the list of segments. A segment within one part is that part's own; one that a cut goes
// through is collected by several parts, its histograms are added up, and each part sends what is above the threshold
// that they found together.
//
// Decode takes all ranks tile by tile, in rank order, and writes the mean once.
#include <cmath>
#include <mutex>
#include <vector>

#include "collect.h"
#include "common.h"
#include "places.h"
#include "threads.h"

namespace {

// The k largest magnitudes: all above `bits`, and the first `ties` of those equal to it.
struct Threshold {
    uint32_t bits;
    int64_t ties;
};

// Values that may be among the k largest, by ascending place. The memory is kept from call to call.
struct Candidates {
    std::vector<float> values;
    std::vector<int32_t> places;
    std::vector<uint32_t> keys;  // room for `select`
    int64_t count = 0;

    void make_room(int64_t more) {
        if (count + more <= static_cast<int64_t>(values.size())) return;
        values.resize(static_cast<size_t>(2 * (count + more)));
        places.resize(values.size());
    }

    void append(const Candidates& other, int64_t begin, int64_t end) {
        std::copy_n(other.values.data() + begin, end - begin, values.data() + count);
        std::copy_n(other.places.data() + begin, end - begin, places.data() + count);
        count += end - begin;
    }

    void give_back(int64_t most) {
        if (static_cast<int64_t>(values.size()) > most) *this = Candidates();
    }

    uint32_t* room_for_keys(int64_t size) {
        if (size > static_cast<int64_t>(keys.size())) keys.resize(static_cast<size_t>(2 * size));
        return keys.data();
    }
};

constexpr int64_t kBins = 2048;  // of the upper 11 bits of a magnitude
constexpr int kBinShift = 20;
constexpr int64_t kLargestSample = 16384;
constexpr int64_t kSmallestStride = 32;
constexpr int64_t kLeastKept = 1 << 17;  // candidates: 1.5 MB
constexpr int64_t kFew = 512;  // up to here sorting beats a histogram

// One segment of the bucket, and its part of the payload.
struct Segment {
    int64_t index, start, n, k;
    uint8_t* payload;
};

// A part's share of the candidates of a segment that a cut goes through.
struct Span {
    int64_t segment = -1, begin = 0, end = 0;
    int64_t keys_begin = 0, keys_end = 0;
    int64_t above = 0;
    int64_t first_sent = 0, sent = 0, ties = 0;
    int64_t histogram[kBins];
};

struct Part {
    Candidates found;
    Candidates all;       // only after a bad guess
    Candidates together;  // of several parts, where fewer than k were found
    Span spans[2];

    void give_back(int64_t most) {
        for (Candidates* list : {&found, &all, &together}) list->give_back(most);
    }
};

// Some candidates.
struct List {
    const float* values;
    const int32_t* places;
    int64_t count;
};

// A segment that a cut goes through.
struct Divided {
    Segment segment;
    uint32_t guess;
    uint32_t bin;
    Threshold threshold;
    bool is_done;
};

struct Encoding {
    const float* bucket;
    float* residual;
    uint8_t* payload;
    const int64_t* segments;
    const int64_t* counts;
    int64_t segment_count, elements, parts;
    Part* part;
    std::vector<Divided>* divided;

    int64_t cut(int64_t p) const { return elements * p / parts; }

    Segment first() const { return {-1, 0, 0, 0, payload}; }

    bool next(Segment& segment) const {
        segment.start += segment.n;
        segment.payload += 4 * segment.k + round_up(places_layout(segment.n, segment.k).bytes(), 4);
        if (++segment.index == segment_count) return false;
        segment.n = segments[segment.index];
        segment.k = counts[segment.index];
        return true;
    }
};

}  // namespace

// Which bin the k-th largest is in; `left` becomes its number within the bin.
FXCOMP_INLINE uint32_t find_bin(const int64_t* histogram, int64_t bins, int64_t& left) {
    uint32_t bin = static_cast<uint32_t>(bins - 1);
    while (histogram[bin] < left) left -= histogram[bin--];
    return bin;
}

FXCOMP_INLINE void count_bins(const float* values, int64_t count, int64_t* histogram) {
    std::memset(histogram, 0, kBins * sizeof *histogram);
    for (int64_t i = 0; i < count; ++i) ++histogram[magnitude_bits(values[i]) >> kBinShift];
}

// The magnitudes in a bin; returns how many, and counts those above it.
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

// The left-th largest of magnitudes that share a bin, in lists one behind the other, by two digits of 10 bits.
FXCOMP_INLINE Threshold select_in_bin(const Candidates* const* lists, const Span* const* spans, int64_t list_count,
                                      uint32_t bin, int64_t left) {
    uint32_t prefix = bin << kBinShift;
    for (int shift = 10; shift >= 0; shift -= 10) {
        int64_t histogram[1024] = {};
        for (int64_t l = 0; l < list_count; ++l) {
            const uint32_t* keys = lists[l]->keys.data();
            for (int64_t i = spans[l]->keys_begin; i < spans[l]->keys_end; ++i) {
                if ((keys[i] ^ prefix) >> (shift + 10) == 0) ++histogram[(keys[i] >> shift) & 1023u];
            }
        }
        prefix |= find_bin(histogram, 1024, left) << shift;
    }
    return {prefix, left};
}

// The k-th largest magnitude of a list.
FXCOMP_INLINE Threshold select(const float* values, int64_t count, int64_t k, Candidates& memory) {
    uint32_t* const keys = memory.room_for_keys(count + 1);
    if (count <= kFew) {
        for (int64_t i = 0; i < count; ++i) keys[i] = magnitude_bits(values[i]);
        std::nth_element(keys, keys + (count - k), keys + count);
        const uint32_t bits = keys[count - k];
        int64_t ties = 0;
        for (int64_t i = count - k; i < count; ++i) ties += keys[i] == bits;
        return {bits, ties};
    }
    int64_t histogram[kBins];
    count_bins(values, count, histogram);
    int64_t left = k, above = 0;
    const uint32_t bin = find_bin(histogram, kBins, left);
    Span span;
    span.keys_end = take_bin(values, count, bin, keys, above);
    const Candidates* const list = &memory;
    const Span* const spans = &span;
    return select_in_bin(&list, &spans, 1, bin, left);
}

// A magnitude that probably somewhat more than k of the n values reach; above zero, and reached by all not finite.
template <bool kFeedback>
FXCOMP_INLINE uint32_t guess_threshold(const float* bucket, const float* residual, int64_t n, int64_t k,
                                       Candidates& memory) {
    if (n <= kFew) return 1;
    // An odd stride does not fall into step with the rows of a matrix.
    const int64_t stride = std::max(n / kLargestSample, kSmallestStride) | 1;
    const int64_t size = ceil_divide(n, stride);
    memory.make_room(size);
    float* const sample = memory.values.data() + memory.count;
    for (int64_t i = 0; i < size; ++i) sample[i] = compensated<kFeedback>(bucket, residual, i * stride);
    const double expected = static_cast<double>(size) * static_cast<double>(k) / static_cast<double>(n);
    const int64_t rank = static_cast<int64_t>(1.05 * expected + 4.0 * std::sqrt(expected)) + 4;
    return rank >= size ? 1 : std::clamp(select(sample, size, rank, memory).bits, 1u, kInfinityBits);
}

// Handles up to 64 values: the residual takes each finite one, the candidates those from `threshold` on.
template <bool kFeedback>
FXCOMP_INLINE void collect_run(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual, int64_t place,
                               int64_t size, uint32_t threshold, float* to_values, int32_t* to_places,
                               int64_t& count) {
    alignas(64) float values[kRun];
    alignas(64) uint8_t flags[kRun] = {};
    for (int64_t i = 0; i < size; ++i) values[i] = compensated<kFeedback>(bucket, residual, i);
    for (int64_t i = 0; i < size; ++i) flags[i] = magnitude_bits(values[i]) >= threshold;
    if (kFeedback) {
        for (int64_t i = 0; i < size; ++i) {
            residual[i] = magnitude_bits(values[i]) < kInfinityBits ? values[i] : residual[i];
        }
    }
    append_flagged(flags, values, place, to_values, to_places, count);
}

// Collects from values begin..end-1 of a segment.
template <bool kFeedback>
FXCOMP_INLINE void collect(const float* bucket, float* residual, int64_t begin, int64_t end, uint32_t threshold,
                           Candidates& found) {
    int64_t count = found.count;
    for (int64_t place = begin; place < end; place += kRun) {
        if (count + kRun + 2 > static_cast<int64_t>(found.values.size())) {
            found.count = count;
            found.make_room(kRun + 2);
        }
        float* const values = found.values.data();
        int32_t* const places = found.places.data();
        float* const left_out = kFeedback ? residual + place : nullptr;
        if (place + kRun <= end) {
            collect_run<kFeedback>(bucket + place, left_out, place, kRun, threshold, values, places, count);
        } else {
            collect_run<kFeedback>(bucket + place, left_out, place, end - place, threshold, values, places, count);
        }
    }
    found.count = count;
}

// Writes what is above the threshold, and the first ties, to places `first`.. of the payload, until `sent` are sent.
template <bool kFeedback, int kForm>
FXCOMP_INLINE PlacesWriter<kForm> send(const float* values, const int32_t* places, Threshold threshold, float* residual,
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

template <bool kFeedback>
FXCOMP_INLINE void send_all(const float* values, const int32_t* places, Threshold threshold, float* residual,
                            const Segment& segment) {
    const PlacesLayout layout = places_layout(segment.n, segment.k);
    clear_bits(segment, layout);
    switch (layout.form) {
        case kBitmap:
            send<kFeedback, kBitmap>(values, places, threshold, residual, segment, layout, 0, segment.k).finish();
            break;
        case 8:
            send<kFeedback, 8>(values, places, threshold, residual, segment, layout, 0, segment.k).finish();
            break;
        default:
            send<kFeedback, 16>(values, places, threshold, residual, segment, layout, 0, segment.k).finish();
    }
}

FXCOMP_INLINE bool has_non_finite(const List& list) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < list.count; ++i) largest = std::max(largest, magnitude_bits(list.values[i]));
    return largest >= kInfinityBits;
}

// Sends all of a list of fewer than k values, and the first zeros among the others, which are all zero.
template <bool kFeedback, int kForm>
FXCOMP_INLINE PlacesWriter<kForm> send_with_zeros(const List& list, const float* compensated_values, float* residual,
                                                  const Segment& segment, const PlacesLayout& layout) {
    PlacesWriter<kForm> writer(segment.payload + 4 * segment.k, layout, 0);
    int64_t next = 0, zeros = segment.k - list.count;
    for (int64_t place = 0; writer.next < segment.k; ++place) {
        if (zeros == 0) place = list.places[next];
        const bool is_listed = next < list.count && list.places[next] == place;
        const float value = is_listed ? list.values[next] : compensated_values[place];
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
FXCOMP_INLINE uint32_t exact_threshold(const float* compensated_values, const List& list, const Segment& segment) {
    int64_t even[kBins] = {}, odd[kBins] = {};  // two, as neighbours often share a bin
    const auto bin_of = [&](int64_t i) FXCOMP_LAMBDA { return magnitude_bits(compensated_values[i]) >> kBinShift; };
    for (int64_t i = 0; i + 1 < segment.n; i += 2) {
        ++even[bin_of(i)];
        ++odd[bin_of(i + 1)];
    }
    if (segment.n % 2 != 0) ++even[bin_of(segment.n - 1)];
    for (int64_t i = 0; i < list.count; ++i) {
        if (magnitude_bits(list.values[i]) < kInfinityBits) continue;
        --odd[bin_of(list.places[i])];
        ++odd[magnitude_bits(list.values[i]) >> kBinShift];
    }
    for (int64_t bin = 0; bin < kBins; ++bin) even[bin] += odd[bin];
    int64_t left = segment.k;
    return std::max(find_bin(even, kBins, left) << kBinShift, 1u);
}

// Puts what is not finite in a list among what was collected again, by place.
FXCOMP_INLINE void take_over(const List& list, Candidates& all) {
    Candidates both;
    both.make_room(all.count + list.count);
    for (int64_t i = 0, j = 0; i < all.count || j < list.count;) {
        if (j < list.count && magnitude_bits(list.values[j]) < kInfinityBits) {
            ++j;
            continue;
        }
        const auto at = static_cast<size_t>(both.count++), from = static_cast<size_t>(i);
        if (j == list.count || (i < all.count && all.places[from] < list.places[j])) {
            both.values[at] = all.values[from];
            both.places[at] = all.places[from];
            ++i;
            continue;
        }
        both.values[at] = list.values[j];
        both.places[at] = list.places[j];
        i += i < all.count && all.places[from] == list.places[j];
        ++j;
    }
    std::swap(both.values, all.values);
    std::swap(both.places, all.places);
    all.count = both.count;
}

// Sends the k largest, from a list of all that reached the guess.
template <bool kFeedback>
FXCOMP_INLINE void send_from(List list, uint32_t guess, const float* bucket, float* residual, const Segment& segment,
                             Part& part) {
    const float* const compensated_values = kFeedback ? residual : bucket;
    if (list.count < segment.k && guess > 1) {
        part.all.count = 0;
        collect<false>(compensated_values, nullptr, 0, segment.n,
                       exact_threshold(compensated_values, list, segment), part.all);
        if (kFeedback && has_non_finite(list)) take_over(list, part.all);
        list = {part.all.values.data(), part.all.places.data(), part.all.count};
    }
    if (list.count >= segment.k) {
        const Threshold threshold = select(list.values, list.count, segment.k, part.found);
        send_all<kFeedback>(list.values, list.places, threshold, residual, segment);
        return;
    }
    const PlacesLayout layout = places_layout(segment.n, segment.k);
    clear_bits(segment, layout);
    if (layout.form == kBitmap) {
        send_with_zeros<kFeedback, kBitmap>(list, compensated_values, residual, segment, layout).finish();
    } else if (layout.form == 8) {
        send_with_zeros<kFeedback, 8>(list, compensated_values, residual, segment, layout).finish();
    } else {
        send_with_zeros<kFeedback, 16>(list, compensated_values, residual, segment, layout).finish();
    }
}

template <bool kFeedback>
FXCOMP_INLINE void encode_whole(const Encoding& job, const Segment& segment, Part& part) {
    const float* const bucket = job.bucket + segment.start;
    float* const residual = kFeedback ? job.residual + segment.start : nullptr;
    Candidates& found = part.found;
    const int64_t before = found.count;
    const uint32_t guess = guess_threshold<kFeedback>(bucket, residual, segment.n, segment.k, found);
    collect<kFeedback>(bucket, residual, 0, segment.n, guess, found);
    const List list{found.values.data() + before, found.places.data() + before, found.count - before};
    send_from<kFeedback>(list, guess, bucket, residual, segment, part);
    found.count = before;
}

template <bool kFeedback>
FXCOMP_INLINE void collect_part(const Encoding& job, int64_t p) {
    Part& part = job.part[p];
    const int64_t begin = job.cut(p), end = job.cut(p + 1);
    part.found.count = 0;
    part.spans[0].segment = part.spans[1].segment = -1;
    int64_t spans = 0;
    for (Segment segment = job.first(); job.next(segment) && segment.start < end;) {
        const int64_t from = std::max(segment.start, begin), to = std::min(segment.start + segment.n, end);
        if (from >= to) continue;
        if (to - from == segment.n) {
            encode_whole<kFeedback>(job, segment, part);
            continue;
        }
        Span& span = part.spans[spans++];
        span.segment = segment.index;
        span.begin = part.found.count;
        uint32_t guess = 1;
        for (const Divided& divided : *job.divided) {
            if (divided.segment.index == segment.index) guess = divided.guess;
        }
        collect<kFeedback>(job.bucket + segment.start, kFeedback ? job.residual + segment.start : nullptr,
                           from - segment.start, to - segment.start, guess, part.found);
        span.end = part.found.count;
        count_bins(part.found.values.data() + span.begin, span.end - span.begin, span.histogram);
    }
}

FXCOMP_BODY void collect_part_of(const Encoding& job, int64_t p) {
    if (job.residual != nullptr) {
        collect_part<true>(job, p);
    } else {
        collect_part<false>(job, p);
    }
}

FXCOMP_INLINE const Divided* divided_of(const Encoding& job, const Span& span) {
    if (span.segment < 0) return nullptr;
    for (const Divided& divided : *job.divided) {
        if (divided.segment.index == span.segment) return divided.is_done ? nullptr : &divided;
    }
    return nullptr;
}

FXCOMP_BODY void take_bins_of(const Encoding& job, int64_t p) {
    Part& part = job.part[p];
    uint32_t* const keys = part.found.room_for_keys(part.found.count + 2);
    int64_t taken = 0;
    for (Span& span : part.spans) {
        const Divided* const divided = divided_of(job, span);
        if (divided == nullptr) continue;
        span.keys_begin = taken;
        span.above = 0;
        taken += take_bin(part.found.values.data() + span.begin, span.end - span.begin, divided->bin, keys + taken,
                          span.above);
        span.keys_end = taken;
    }
}

template <bool kFeedback, int kForm>
FXCOMP_INLINE void send_span(const Encoding& job, const Divided& divided, const PlacesLayout& layout,
                             const Candidates& found, const Span& span, std::mutex& turn) {
    const Segment& segment = divided.segment;
    float* const residual = kFeedback ? job.residual + segment.start : nullptr;
    const auto writer = send<kFeedback, kForm>(
        found.values.data() + span.begin, found.places.data() + span.begin, {divided.threshold.bits, span.ties},
        residual, segment, layout, span.first_sent, span.sent);
    const std::lock_guard<std::mutex> mine(turn);  // two parts may share a byte
    writer.finish();
}

template <bool kFeedback>
FXCOMP_INLINE void send_part(const Encoding& job, int64_t p, std::mutex& turn) {
    for (const Span& span : job.part[p].spans) {
        const Divided* const divided = divided_of(job, span);
        if (divided == nullptr || span.sent == 0) continue;
        const Candidates& found = job.part[p].found;
        const PlacesLayout layout = places_layout(divided->segment.n, divided->segment.k);
        if (layout.form == kBitmap) send_span<kFeedback, kBitmap>(job, *divided, layout, found, span, turn);
        if (layout.form == 8) send_span<kFeedback, 8>(job, *divided, layout, found, span, turn);
        if (layout.form == 16) send_span<kFeedback, 16>(job, *divided, layout, found, span, turn);
    }
}

FXCOMP_BODY void send_part_of(const Encoding& job, int64_t p, std::mutex& turn) {
    if (job.residual != nullptr) {
        send_part<true>(job, p, turn);
    } else {
        send_part<false>(job, p, turn);
    }
}

// Finds the segments that cuts go through, and guesses their thresholds.
static void find_divided(const Encoding& job) {
    job.divided->clear();
    Segment segment = job.first();
    for (int64_t p = 1; p < job.parts; ++p) {
        const int64_t cut = job.cut(p);
        bool is_left = true;
        while (is_left && segment.start + segment.n <= cut) is_left = job.next(segment);
        if (!is_left) return;
        if (segment.start >= cut) continue;
        if (!job.divided->empty() && job.divided->back().segment.index == segment.index) continue;
        job.divided->push_back({segment, 1, 0, {0, 0}, false});
    }
}

FXCOMP_BODY void guess_divided(const Encoding& job, Divided& divided, Candidates& memory) {
    const Segment& segment = divided.segment;
    memory.count = 0;
    const float* const bucket = job.bucket + segment.start;
    divided.guess = job.residual != nullptr
                        ? guess_threshold<true>(bucket, job.residual + segment.start, segment.n, segment.k, memory)
                        : guess_threshold<false>(bucket, nullptr, segment.n, segment.k, memory);
}

// Adds up what the parts counted; a segment with too few candidates is done here, alone.
FXCOMP_BODY void merge_bins(const Encoding& job, Divided& divided, int64_t& left) {
    const Segment& segment = divided.segment;
    int64_t histogram[kBins] = {}, count = 0;
    for (int64_t p = 0; p < job.parts; ++p) {
        for (const Span& span : job.part[p].spans) {
            if (span.segment != segment.index) continue;
            count += span.end - span.begin;
            for (int64_t bin = 0; bin < kBins; ++bin) histogram[bin] += span.histogram[bin];
        }
    }
    left = segment.k;
    if (count >= segment.k) {
        divided.bin = find_bin(histogram, kBins, left);
        clear_bits(segment, places_layout(segment.n, segment.k));
        return;
    }
    divided.is_done = true;
    Part& part = job.part[0];
    part.together.count = 0;
    part.together.make_room(count);
    for (int64_t p = 0; p < job.parts; ++p) {
        for (const Span& span : job.part[p].spans) {
            if (span.segment == segment.index) part.together.append(job.part[p].found, span.begin, span.end);
        }
    }
    const List list{part.together.values.data(), part.together.places.data(), count};
    const float* const bucket = job.bucket + segment.start;
    if (job.residual != nullptr) {
        send_from<true>(list, divided.guess, bucket, job.residual + segment.start, segment, part);
    } else {
        send_from<false>(list, divided.guess, bucket, nullptr, segment, part);
    }
}

// The threshold of a divided segment, and what each part sends of it.
FXCOMP_BODY void share_out(const Encoding& job, Divided& divided, int64_t left, std::vector<const Candidates*>& lists,
                           std::vector<Span*>& spans) {
    lists.clear();
    spans.clear();
    for (int64_t p = 0; p < job.parts; ++p) {
        for (Span& span : job.part[p].spans) {
            if (span.segment != divided.segment.index) continue;
            lists.push_back(&job.part[p].found);
            spans.push_back(&span);
        }
    }
    divided.threshold = select_in_bin(lists.data(), spans.data(), static_cast<int64_t>(spans.size()), divided.bin, left);
    int64_t sent = 0, ties = divided.threshold.ties;
    for (size_t l = 0; l < spans.size(); ++l) {
        Span& span = *spans[l];
        const uint32_t* const keys = lists[l]->keys.data();
        int64_t above = span.above, equal = 0;
        for (int64_t i = span.keys_begin; i < span.keys_end; ++i) {
            above += keys[i] > divided.threshold.bits;
            equal += keys[i] == divided.threshold.bits;
        }
        span.ties = std::min(ties, equal);
        span.first_sent = sent;
        span.sent = above + span.ties;
        sent += span.sent;
        ties -= span.ties;
    }
}

static void finish_divided(const Encoding& job) {
    static thread_local std::vector<int64_t> left;
    static thread_local std::vector<const Candidates*> lists;
    static thread_local std::vector<Span*> spans;
    const auto count = job.divided->size();
    left.resize(count);
    for (size_t d = 0; d < count; ++d) widest<merge_bins>(job, (*job.divided)[d], left[d]);
    for_parts(job.parts, [&](int64_t p) { widest<take_bins_of>(job, p); });
    for (size_t d = 0; d < count; ++d) {
        Divided& divided = (*job.divided)[d];
        if (!divided.is_done) widest<share_out>(job, divided, left[d], lists, spans);
    }
    std::mutex turn;
    for_parts(job.parts, [&](int64_t p) { widest<send_part_of>(job, p, turn); });
}

FXCOMP_EXPORT void fxcomp_topk_encode(const float* bucket, float* residual, uint8_t* payload, const void*, const void*,
                                      const int64_t* segments, const int64_t* counts, int64_t segment_count) {
    static thread_local std::vector<Part> parts;
    static thread_local std::vector<Divided> divided;
    const int64_t elements = count_values(segments, segment_count);
    const int64_t part_count = std::clamp<int64_t>(elements / kStagedGrain, 1, thread_budget());
    if (static_cast<int64_t>(parts.size()) < part_count) parts.resize(static_cast<size_t>(part_count));
    const Encoding job{bucket,        residual, payload,    segments,     counts,
                       segment_count, elements, part_count, parts.data(), &divided};
    find_divided(job);
    for (Divided& each : divided) widest<guess_divided>(job, each, parts[0].found);
    for_parts(part_count, [&](int64_t p) { widest<collect_part_of>(job, p); });
    if (!divided.empty()) finish_divided(job);
    // A bad guess, or many values of one magnitude, took far more memory than is needed otherwise.
    int64_t most = kLeastKept;
    for (int64_t s = 0; s < segment_count; ++s) most += 8 * counts[s];
    for (int64_t p = 0; p < part_count; ++p) parts[static_cast<size_t>(p)].give_back(most);
}
