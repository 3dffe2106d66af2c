// The k values of largest magnitude: fxcomp/compressors/topk.py has the formulas and the layout.
//
// 1. naive: sort everything, O(n log n).
// 2. radix select over all values: a histogram pass, a pass to collect, about 1 ns an element.
// 3. (here) guess a low threshold from a sample, write the new residual and collect the candidates above the guess in
//    one pass, then radix select among the candidates only. A bad guess costs time, never exactness.
//
// Decode takes all ranks tile by tile, in rank order, and writes the mean once.
#include <cmath>
#include <vector>

#include "common.h"

namespace {

// Values that may be among the k largest, by ascending index.
struct Candidates {
    std::vector<float> values;
    std::vector<int32_t> indices;
    int64_t count = 0;

    void make_room(int64_t more) {
        const size_t needed = static_cast<size_t>(count + more);
        if (values.size() >= needed) return;
        values.resize(std::max(needed, 2 * values.size()));
        indices.resize(values.size());
    }
};

// The largest values: all above `bits`, and the first `ties` of those equal to it.
struct Threshold {
    uint32_t bits;
    int64_t ties;
};

constexpr int64_t kSample = 16384;
constexpr int64_t kRun = 64;

}  // namespace

// The k-th largest magnitude, by a histogram for each of three digits of 11, 11 and 10 bits.
FXCOMP_INLINE Threshold select(const float* values, int64_t count, int64_t k) {
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
    }
    return {prefix, left};
}

// A magnitude that probably somewhat more than k of the n values reach; at least the smallest above zero.
template <bool kFeedback>
FXCOMP_INLINE uint32_t guess_threshold(const float* bucket, const float* residual, int64_t n, int64_t k) {
    // An odd stride does not fall into step with the rows of a matrix.
    const int64_t stride = (n / kSample) | 1;
    static thread_local std::vector<float> sample;
    sample.clear();
    for (int64_t i = 0; i < n; i += stride) sample.push_back(compensated<kFeedback>(bucket, residual, i));
    const int64_t size = static_cast<int64_t>(sample.size());
    const double expected = static_cast<double>(size) * static_cast<double>(k) / static_cast<double>(n);
    const int64_t rank = static_cast<int64_t>(1.1 * expected + 4.0 * std::sqrt(expected)) + 4;
    if (rank >= size) return 1;
    return std::max(select(sample.data(), size, rank).bits, 1u);
}

// Handles up to 64 values: the residual takes each finite one, the candidates those from `threshold` on.
template <bool kFeedback>
FXCOMP_INLINE void collect_run(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual, int64_t start,
                               int64_t size, uint32_t threshold, Candidates& found) {
    alignas(64) float values[kRun];
    alignas(64) uint8_t flags[kRun] = {};
    for (int64_t i = 0; i < size; ++i) values[i] = compensated<kFeedback>(bucket, residual, i);
    for (int64_t i = 0; i < size; ++i) flags[i] = magnitude_bits(values[i]) >= threshold;
    if (kFeedback) {
        for (int64_t i = 0; i < size; ++i) {
            residual[i] = magnitude_bits(values[i]) < kInfinityBits ? values[i] : residual[i];
        }
    }
    float* found_values = found.values.data();
    int32_t* found_indices = found.indices.data();
    int64_t count = found.count;
    for (int64_t eight = 0; eight < kRun; eight += 8) {
        uint64_t word;
        std::memcpy(&word, flags + eight, sizeof word);
        if (word == 0) continue;
        for (int64_t i = eight; i < eight + 8; ++i) {
            found_values[count] = values[i];
            found_indices[count] = static_cast<int32_t>(start + i);
            count += flags[i];
        }
    }
    found.count = count;
}

// Fewer than k values reached the guess: take all values, those not yet collected from where the first pass left them.
FXCOMP_INLINE void collect_all(const float* compensated_values, int64_t n, Candidates& found) {
    Candidates all;
    all.make_room(n);
    int64_t next = 0;
    for (int64_t i = 0; i < n; ++i) {
        const bool is_collected = next < found.count && found.indices[static_cast<size_t>(next)] == i;
        all.values[static_cast<size_t>(i)] =
            is_collected ? found.values[static_cast<size_t>(next)] : compensated_values[i];
        all.indices[static_cast<size_t>(i)] = static_cast<int32_t>(i);
        next += is_collected;
    }
    all.count = n;
    std::swap(all, found);
}

template <bool kFeedback>
FXCOMP_INLINE void encode_segment(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                                  uint8_t* payload, int64_t n, int64_t k) {
    static thread_local Candidates found;
    found.count = 0;
    const uint32_t guess = guess_threshold<kFeedback>(bucket, residual, n, k);
    int64_t start = 0;
    for (; start + kRun <= n; start += kRun) {
        found.make_room(kRun + 8);
        collect_run<kFeedback>(bucket + start, kFeedback ? residual + start : nullptr, start, kRun, guess, found);
    }
    if (start < n) {
        found.make_room(kRun + 8);
        collect_run<kFeedback>(bucket + start, kFeedback ? residual + start : nullptr, start, n - start, guess, found);
    }
    if (found.count < k) collect_all(kFeedback ? residual : bucket, n, found);

    Threshold cut = select(found.values.data(), found.count, k);
    uint8_t* value_out = payload;
    uint8_t* index_out = payload + 4 * k;
    for (int64_t i = 0; i < found.count; ++i) {
        const float value = found.values[static_cast<size_t>(i)];
        const int32_t index = found.indices[static_cast<size_t>(i)];
        const uint32_t bits = magnitude_bits(value);
        if (bits < cut.bits || (bits == cut.bits && cut.ties-- <= 0)) continue;
        store_float(value_out, value);
        std::memcpy(index_out, &index, sizeof index);
        value_out += 4;
        index_out += 4;
        if (kFeedback && bits < kInfinityBits) residual[index] = 0.0f;
    }
}

FXCOMP_KERNEL void fxcomp_topk_encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                                      const int64_t* counts, int64_t segment_count) {
    for (int64_t s = 0; s < segment_count; ++s) {
        if (segments[s] == 0) continue;
        if (residual != nullptr) {
            encode_segment<true>(bucket, residual, payload, segments[s], counts[s]);
            residual += segments[s];
        } else {
            encode_segment<false>(bucket, residual, payload, segments[s], counts[s]);
        }
        bucket += segments[s];
        payload += 8 * counts[s];
    }
}

// Returns 0 if an index lies outside its segment: that payload is not one of ours.
FXCOMP_KERNEL int32_t fxcomp_topk_decode(const uint8_t* payloads, int64_t ranks, const int64_t* segments,
                                         const int64_t* counts, int64_t segment_count, float* out) {
    int64_t payload_bytes = 0;
    for (int64_t s = 0; s < segment_count; ++s) payload_bytes += 8 * counts[s];
    const float factor = mean_factor(ranks);
    static thread_local std::vector<int64_t> next;
    for (int64_t s = 0; s < segment_count; ++s) {
        const int64_t n = segments[s], k = counts[s];
        next.assign(static_cast<size_t>(ranks), 0);
        for (int64_t start = 0; start < n; start += 4 * kTile) {
            const int64_t size = std::min(4 * kTile, n - start);
            float* tile = out + start;
            std::memset(tile, 0, static_cast<size_t>(size) * sizeof(float));
            for (int64_t rank = 0; rank < ranks; ++rank) {
                const uint8_t* values = payloads + rank * payload_bytes;
                const uint8_t* indices = values + 4 * k;
                int64_t at = next[static_cast<size_t>(rank)];
                for (; at < k; ++at) {
                    int32_t index;
                    std::memcpy(&index, indices + 4 * at, sizeof index);
                    if (index >= start + size) break;
                    if (index < start) return 0;
                    tile[index - start] += load_float(values + 4 * at);
                }
                next[static_cast<size_t>(rank)] = at;
            }
            if (ranks > 1) {
                for (int64_t i = 0; i < size; ++i) tile[i] *= factor;
            }
        }
        for (int64_t rank = 0; rank < ranks; ++rank) {
            if (next[static_cast<size_t>(rank)] != k) return 0;
        }
        out += n;
        payloads += 8 * k;
    }
    return 1;
}
