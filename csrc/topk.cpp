// The k values of largest magnitude: fxcomp/compressors/topk.py has the formulas and the layout.
//
// 1. naive: sort everything, O(n log n).
// 2. radix select over all values: a histogram pass, a pass to collect, about 1 ns an element.
// 3. (here) guess a low threshold from a sample, write the new residual and collect the candidates above the guess in
//    one pass, then radix select among the candidates only. A bad guess costs time and scratch, never exactness.
//
// Decode takes all ranks tile by tile, in rank order, and writes the mean once.
#include <cmath>
#include <vector>

#include "common.h"

namespace {

// Values that may be among the k largest, by ascending index. The memory is kept from call to call.
struct Scratch {
    std::vector<float> values;
    std::vector<int32_t> indices;
};

// The same as plain pointers, which the compiler keeps in registers.
struct Candidates {
    Scratch& scratch;
    float* values = nullptr;
    int32_t* indices = nullptr;
    int64_t count = 0;
    int64_t capacity = 0;

    explicit Candidates(Scratch& memory) : scratch(memory) { make_room(0); }

    void make_room(int64_t more) {
        if (count + more > static_cast<int64_t>(scratch.values.size())) {
            scratch.values.resize(static_cast<size_t>(2 * (count + more)));
            scratch.indices.resize(scratch.values.size());
        }
        values = scratch.values.data();
        indices = scratch.indices.data();
        capacity = static_cast<int64_t>(scratch.values.size());
    }
};

// The largest values: all above `bits`, and the first `ties` of those equal to it.
struct Threshold {
    uint32_t bits;
    int64_t ties;
};

constexpr int64_t kLargestSample = 16384;
constexpr int64_t kSmallestStride = 32;
constexpr int64_t kRun = 64;

}  // namespace

// The k-th largest magnitude, by a histogram for each of three digits of 11, 10 and 10 bits.
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
FXCOMP_INLINE uint32_t guess_threshold(const float* bucket, const float* residual, int64_t n, int64_t k,
                                       Scratch& scratch) {
    // An odd stride does not fall into step with the rows of a matrix.
    const int64_t stride = std::max(n / kLargestSample, kSmallestStride) | 1;
    const int64_t size = ceil_divide(n, stride);
    scratch.values.resize(std::max(scratch.values.size(), static_cast<size_t>(size)));
    scratch.indices.resize(scratch.values.size());
    float* const sample = scratch.values.data();
    for (int64_t i = 0; i < size; ++i) sample[i] = compensated<kFeedback>(bucket, residual, i * stride);
    const double expected = static_cast<double>(size) * static_cast<double>(k) / static_cast<double>(n);
    const int64_t rank = static_cast<int64_t>(1.05 * expected + 4.0 * std::sqrt(expected)) + 4;
    return rank >= size ? 1 : std::max(select(sample, size, rank).bits, 1u);
}

// Takes the lowest bit out of `mask` and appends its value; appends nothing if there is none.
FXCOMP_INLINE void append_lowest(uint64_t& mask, const float* values, int64_t start, Candidates& found) {
    const int64_t i = count_trailing_zeros(mask) & (kRun - 1);
    found.values[found.count] = values[i];
    found.indices[found.count] = static_cast<int32_t>(start + i);
    found.count += mask != 0;
    mask &= mask - 1;
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
    uint64_t mask = 0;
    for (int64_t byte = 0; byte < kRun / 8; ++byte) {
        mask |= static_cast<uint64_t>(pack_eight(flags + 8 * byte)) << (8 * byte);
    }
    // Most runs have no or one candidate: taking two without a branch avoids most mispredictions.
    append_lowest(mask, values, start, found);
    append_lowest(mask, values, start, found);
    while (mask != 0) append_lowest(mask, values, start, found);
}

// Fewer than k values reached the guess: take all values, those not yet collected from where the first pass left them.
FXCOMP_INLINE void collect_all(const float* compensated_values, int64_t n, Candidates& found) {
    const std::vector<float> old_values(found.values, found.values + found.count);
    const std::vector<int32_t> old_indices(found.indices, found.indices + found.count);
    found.count = 0;
    found.make_room(n);
    for (int64_t i = 0; i < n; ++i) {
        found.values[i] = compensated_values[i];
        found.indices[i] = static_cast<int32_t>(i);
    }
    for (size_t i = 0; i < old_values.size(); ++i) found.values[old_indices[i]] = old_values[i];
    found.count = n;
}

// Writes the k largest candidates to the payload and clears their residual.
template <bool kFeedback>
FXCOMP_INLINE void send_largest(const Candidates& found, float* residual, uint8_t* payload, int64_t k) {
    Threshold cut = select(found.values, found.count, k);
    for (int64_t i = 0, sent = 0; sent < k; ++i) {
        const float value = found.values[i];
        const int32_t index = found.indices[i];
        const uint32_t bits = magnitude_bits(value);
        const bool is_tie = bits == cut.bits;
        const bool is_sent = (bits > cut.bits) | (is_tie & (cut.ties > 0));
        cut.ties -= is_tie;
        // Without a branch: what is not sent is overwritten by the next.
        store_float(payload + 4 * sent, value);
        std::memcpy(payload + 4 * (k + sent), &index, sizeof index);
        sent += is_sent;
        if (kFeedback) residual[index] = (is_sent & (bits < kInfinityBits)) ? 0.0f : residual[index];
    }
}

template <bool kFeedback>
FXCOMP_INLINE void encode_segment(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                                  uint8_t* payload, int64_t n, int64_t k, Scratch& scratch) {
    const uint32_t guess = guess_threshold<kFeedback>(bucket, residual, n, k, scratch);
    Candidates found(scratch);
    for (int64_t start = 0; start < n; start += kRun) {
        if (found.count + kRun + 2 > found.capacity) found.make_room(kRun + 2);
        const float* const run = bucket + start;
        float* const left_out = kFeedback ? residual + start : nullptr;
        if (start + kRun <= n) {
            collect_run<kFeedback>(run, left_out, start, kRun, guess, found);
        } else {
            collect_run<kFeedback>(run, left_out, start, n - start, guess, found);
        }
    }
    if (found.count < k) collect_all(kFeedback ? residual : bucket, n, found);
    send_largest<kFeedback>(found, residual, payload, k);
}

FXCOMP_KERNEL void fxcomp_topk_encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                                      const int64_t* counts, int64_t segment_count) {
    static thread_local Scratch scratch;
    for (int64_t s = 0; s < segment_count; ++s) {
        if (segments[s] == 0) continue;
        if (residual != nullptr) {
            encode_segment<true>(bucket, residual, payload, segments[s], counts[s], scratch);
            residual += segments[s];
        } else {
            encode_segment<false>(bucket, residual, payload, segments[s], counts[s], scratch);
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
