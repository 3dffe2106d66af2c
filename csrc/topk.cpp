// The k values of largest magnitude: fxcomp/compressors/topk.py has the formulas and the layout.
//
// 1. naive: sort everything, O(n log n).
// 2. radix select over all values: a histogram pass, a pass to collect, about 1 ns an element.
// 3. (here) guess a low threshold from a sample, write the new residual and collect the candidates above the guess in
//    one pass, then radix select among the candidates only. A bad guess costs time and scratch, never exactness.
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

    uint32_t* room_for_keys(int64_t size) {
        if (size > static_cast<int64_t>(keys.size())) keys.resize(static_cast<size_t>(2 * size));
        return keys.data();
    }
};

constexpr int64_t kBins = 2048;  // of the upper 11 bits of a magnitude
constexpr int kBinShift = 20;
constexpr int64_t kLargestSample = 16384;
constexpr int64_t kSmallestStride = 32;
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
    Candidates all;  // only after a bad guess
    Span spans[2];
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

// Fewer than k values reached the guess: take all values from where the first pass left them, the collected ones over
// them, for what is not finite is not in the residual.
FXCOMP_INLINE void take_all(const float* compensated_values, int64_t n, Candidates& all) {
    all.count = 0;
    all.make_room(n);
    for (int64_t i = 0; i < n; ++i) {
        all.values[static_cast<size_t>(i)] = compensated_values[i];
        all.places[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    }
}

FXCOMP_INLINE void take_over(const Candidates& found, int64_t begin, int64_t end, Candidates& all) {
    for (int64_t i = begin; i < end; ++i) {
        all.values[static_cast<size_t>(found.places[static_cast<size_t>(i)])] = found.values[static_cast<size_t>(i)];
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
    const float* values = found.values.data() + before;
    const int32_t* places = found.places.data() + before;
    int64_t count = found.count - before;
    if (count < segment.k) {
        take_all(kFeedback ? residual : bucket, segment.n, part.all);
        take_over(found, before, found.count, part.all);
        values = part.all.values.data();
        places = part.all.places.data();
        count = segment.n;
    }
    send_all<kFeedback>(values, places, select(values, count, segment.k, found), residual, segment);
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
    Candidates& all = job.part[0].all;
    float* const residual = job.residual == nullptr ? nullptr : job.residual + segment.start;
    take_all(residual == nullptr ? job.bucket + segment.start : residual, segment.n, all);
    for (int64_t p = 0; p < job.parts; ++p) {
        for (const Span& span : job.part[p].spans) {
            if (span.segment == segment.index) take_over(job.part[p].found, span.begin, span.end, all);
        }
    }
    const Threshold threshold = select(all.values.data(), segment.n, segment.k, all);
    if (residual != nullptr) {
        send_all<true>(all.values.data(), all.places.data(), threshold, residual, segment);
    } else {
        send_all<false>(all.values.data(), all.places.data(), threshold, nullptr, segment);
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

FXCOMP_EXPORT void fxcomp_topk_encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                                      const int64_t* counts, int64_t segment_count) {
    static thread_local std::vector<Part> parts;
    static thread_local std::vector<Divided> divided;
    int64_t elements = 0;
    for (int64_t s = 0; s < segment_count; ++s) elements += segments[s];
    const int64_t part_count = std::clamp<int64_t>(elements / kGrain, 1, thread_budget());
    if (static_cast<int64_t>(parts.size()) < part_count) parts.resize(static_cast<size_t>(part_count));
    const Encoding job{bucket,        residual, payload,    segments,     counts,
                       segment_count, elements, part_count, parts.data(), &divided};
    find_divided(job);
    for (Divided& each : divided) widest<guess_divided>(job, each, parts[0].found);
    for_parts(part_count, [&](int64_t p) { widest<collect_part_of>(job, p); });
    if (!divided.empty()) finish_divided(job);
}
