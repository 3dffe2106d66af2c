// An orthonormal basis of what a few long vectors span, by Gram and Schmidt in double; powersgd.py is the reference.
//
// Sums run in halves over a power of two of terms: the same order at any vector width.
#pragma once

#include <cmath>
#include <vector>

#include "common.h"
#include "levels.h"
#include "random.h"

namespace {

constexpr int64_t kSpan = 64;  // columns of a product that add up apart
constexpr double kNothingLeft = 0x1p-20;

// `rank` vectors, one behind the other, each `stride` long.
struct Factors {
    const float* values;
    int64_t stride;
};

// Orthonormal vectors, kept from call to call; what follows a vector, up to a multiple of kSpan, is zero.
struct Basis {
    std::vector<float> values;
    std::vector<double> exact, terms;
    int64_t stride = 0;

    Factors factors() const { return {values.data(), stride}; }
};

FXCOMP_INLINE double dot(const double* FXCOMP_RESTRICT a, const double* FXCOMP_RESTRICT b, int64_t size, int64_t padded,
                         double* FXCOMP_RESTRICT terms) {
    for (int64_t i = 0; i < size; ++i) terms[i] = a[i] * b[i];
    for (int64_t i = size; i < padded; ++i) terms[i] = 0.0;
    for (int64_t half = padded / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) terms[i] += terms[i + half];
    }
    return terms[0];
}

FXCOMP_INLINE double norm(const double* vector, int64_t size, int64_t padded, double* terms) {
    return std::sqrt(dot(vector, vector, size, padded, terms));
}

// Twice, for the first time leaves rounding errors of the size of what it takes away.
FXCOMP_INLINE void take_away(const double* basis, int64_t count, int64_t size, int64_t padded, double* vector,
                             double* terms) {
    for (int64_t j = 0; j < 2 * count; ++j) {
        const double* FXCOMP_RESTRICT other = basis + (j % count) * size;
        const double part = dot(other, vector, size, padded, terms);
        double* FXCOMP_RESTRICT to = vector;
        for (int64_t i = 0; i < size; ++i) to[i] = to[i] - part * other[i];
    }
}

FXCOMP_INLINE bool is_finite(const float* values, int64_t size) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, magnitude_bits(values[i]));
    return largest < kInfinityBits;
}

// `values` are `rank` vectors; those that are not finite count as zeros.
FXCOMP_BODY void orthonormalise(const float* values, int64_t rank, int64_t size, int64_t padded, bool as_zero,
                                double* exact, double* terms, float* out, int64_t stride) {
    for (int64_t j = 0; j < rank; ++j) {
        double* FXCOMP_RESTRICT vector = exact + j * size;
        for (int64_t i = 0; i < size; ++i) vector[i] = as_zero ? 0.0 : static_cast<double>(values[j * size + i]);
        const double before = norm(vector, size, padded, terms);
        take_away(exact, j, size, padded, vector, terms);
        double length = norm(vector, size, padded, terms);
        if (!(length > kNothingLeft * before)) {
            const int64_t state[2] = {0, j};
            const Stream stream = stream_of(state);
            for (int64_t i = 0; i < size; ++i) {
                const uint32_t bits = random_bits(stream, static_cast<uint32_t>(i));
                const uint32_t sum = (bits & 255u) + ((bits >> 8) & 255u) + ((bits >> 16) & 255u) + (bits >> 24);
                vector[i] = static_cast<double>(static_cast<int32_t>(sum) - 510);
            }
            take_away(exact, j, size, padded, vector, terms);
            length = norm(vector, size, padded, terms);
        }
        float* FXCOMP_RESTRICT to = out + j * stride;
        for (int64_t i = 0; i < size; ++i) {
            vector[i] = vector[i] / length;
            to[i] = static_cast<float>(vector[i]);
        }
        for (int64_t i = size; i < stride; ++i) to[i] = 0.0f;
    }
}

inline void resize(Basis& basis, int64_t rank, int64_t size, int64_t padded) {
    basis.stride = round_up(size, kSpan);
    const auto grow = [](auto& vector, int64_t elements) {
        if (vector.size() < static_cast<size_t>(elements)) vector.resize(static_cast<size_t>(elements));
    };
    grow(basis.values, rank * basis.stride);
    grow(basis.exact, rank * size);
    grow(basis.terms, padded);
}

inline int64_t power_of_two_from(int64_t size) {
    int64_t power = 1;
    while (power < size) power *= 2;
    return power;
}

// An orthonormal basis of what `rank` vectors span. NaN if one is not finite, or another basis if `mend`.
inline void span(const float* values, int64_t rank, int64_t size, bool mend, Basis& basis) {
    const int64_t padded = power_of_two_from(size);
    resize(basis, rank, size, padded);
    const bool finite = is_finite(values, rank * size);
    if (!finite && !mend) {
        std::fill(basis.values.begin(), basis.values.begin() + rank * basis.stride, float_of(kNanBits));
        return;
    }
    widest<orthonormalise>(values, rank, size, padded, !finite, basis.exact.data(), basis.terms.data(),
                           basis.values.data(), basis.stride);
}

inline Basis& kept_basis() {
    thread_local Basis basis;
    return basis;
}

}  // namespace
