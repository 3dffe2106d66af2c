// Low-rank factors: fxcomp/compressors/powersgd.py has the formulas, the layout and the order of every sum.
//
// Three products of a matrix with a thin factor, each limited by reading the matrix. Written here rather than taken from
// a BLAS, whose bits depend on the machine, and so that v = bucket + residual never goes to main memory: proposing reads
// 8 bytes an element, the payload 8, the residual 8 and 4 to write. All keep 16 sums of 16 lanes in registers.
#include "common.h"
#include "orthonormal.h"
#include "threads.h"

namespace {

constexpr int64_t kLane = 16;        // floats that one operation takes
constexpr int64_t kChunk = 32;       // rows that add up before they join the total
constexpr int64_t kMaxRank = 64;     // as in powersgd.py
constexpr int64_t kRowTile = 1024;   // columns of four rows: 16 KB of the first-level cache
constexpr int64_t kColumnTile = 256; // columns of a chunk: 32 KB

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"  // no function that takes or gives Lanes is ever called: all are inlined
typedef float Lanes __attribute__((vector_size(kLane * sizeof(float))));
#else
struct Lanes {
    float at[kLane];
};
FXCOMP_INLINE Lanes operator+(Lanes a, const Lanes& b) {
    for (int64_t i = 0; i < kLane; ++i) a.at[i] += b.at[i];
    return a;
}
FXCOMP_INLINE Lanes operator*(Lanes a, const Lanes& b) {
    for (int64_t i = 0; i < kLane; ++i) a.at[i] *= b.at[i];
    return a;
}
#endif

FXCOMP_INLINE Lanes load(const float* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

FXCOMP_INLINE void store(float* to, const Lanes& lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// Each of `count` values in all lanes, one behind the other. GCC builds such a vector element by element when it comes
// as an expression, for it lowers vectors before it clones functions; a plain loop it vectorises for each clone.
FXCOMP_INLINE void spread(const float* FXCOMP_RESTRICT values, int64_t count, float* FXCOMP_RESTRICT to) {
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t l = 0; l < kLane; ++l) to[i * kLane + l] = values[i];
    }
}

// A matrix of the bucket, and the residual in the same place or null.
struct Matrix {
    const float* bucket;
    const float* residual;
    int64_t rows, columns;
};

// Writes v of a row from column `first`, and zeros up to a multiple of kSpan.
FXCOMP_INLINE void load_row(const Matrix& m, int64_t row, int64_t first, int64_t size, float* FXCOMP_RESTRICT to) {
    const float* FXCOMP_RESTRICT bucket = m.bucket + row * m.columns + first;
    if (m.residual == nullptr) {
        for (int64_t j = 0; j < size; ++j) to[j] = bucket[j];
    } else {
        const float* FXCOMP_RESTRICT residual = m.residual + row * m.columns + first;
        for (int64_t j = 0; j < size; ++j) to[j] = bucket[j] + residual[j];
    }
    for (int64_t j = size; j < round_up(size, kSpan); ++j) to[j] = 0.0f;
}

// kRows rows times kFactors factors over one tile: each lane of `sums` goes on where it stopped.
template <int64_t kRows, int64_t kFactors>
FXCOMP_INLINE void add_products(const float* tile, const float* factors, int64_t stride, int64_t size, float* sums,
                                int64_t row_stride) {
    for (int64_t lane = 0; lane < kSpan; lane += kLane) {
        Lanes sum[kRows][kFactors];
        for (int64_t i = 0; i < kRows; ++i) {
            for (int64_t k = 0; k < kFactors; ++k) sum[i][k] = load(sums + i * row_stride + k * kSpan + lane);
        }
        for (int64_t j = lane; j < size; j += kSpan) {
            Lanes value[kRows];
            for (int64_t i = 0; i < kRows; ++i) value[i] = load(tile + i * kRowTile + j);
            for (int64_t k = 0; k < kFactors; ++k) {
                const Lanes factor = load(factors + k * stride + j);
                for (int64_t i = 0; i < kRows; ++i) sum[i][k] = sum[i][k] + factor * value[i];
            }
        }
        for (int64_t i = 0; i < kRows; ++i) {
            for (int64_t k = 0; k < kFactors; ++k) store(sums + i * row_stride + k * kSpan + lane, sum[i][k]);
        }
    }
}

template <int64_t kRows>
FXCOMP_INLINE void project_rows(const Matrix& m, int64_t row, const Factors& q, int64_t rank, float* out) {
    alignas(64) float tile[kRows * kRowTile];
    alignas(64) float sums[kRows * kMaxRank * kSpan];
    const int64_t row_stride = rank * kSpan;
    std::memset(sums, 0, static_cast<size_t>(kRows * row_stride) * sizeof(float));
    for (int64_t first = 0; first < m.columns; first += kRowTile) {
        const int64_t size = std::min(kRowTile, m.columns - first);
        for (int64_t i = 0; i < kRows; ++i) load_row(m, row + i, first, size, tile + i * kRowTile);
        int64_t k = 0;
        for (; k + 4 <= rank; k += 4) {
            add_products<kRows, 4>(tile, q.values + k * q.stride + first, q.stride, size, sums + k * kSpan, row_stride);
        }
        for (; k < rank; ++k) {
            add_products<kRows, 1>(tile, q.values + k * q.stride + first, q.stride, size, sums + k * kSpan, row_stride);
        }
    }
    for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t k = 0; k < rank; ++k) {
            float* sum = sums + i * row_stride + k * kSpan;
            for (int64_t half = kSpan / 2; half > 0; half /= 2) {
                for (int64_t l = 0; l < half; ++l) sum[l] += sum[l + half];
            }
            out[k * m.rows + row + i] = sum[0];
        }
    }
}

// out = v q for rows begin..end-1.
FXCOMP_BODY void project(const Matrix& m, const Factors& q, int64_t rank, float* out, int64_t begin, int64_t end) {
    int64_t row = begin;
    for (; row + 4 <= end; row += 4) project_rows<4>(m, row, q, rank, out);
    for (; row < end; ++row) project_rows<1>(m, row, q, rank, out);
}

// kFactors sums over a chunk's rows, kSpan columns each, join the totals.
template <int64_t kFactors>
FXCOMP_INLINE void add_chunk(const float* tile, int64_t rows, const float* factors, int64_t columns, float* totals,
                             int64_t total_stride) {
    constexpr int64_t kParts = kSpan / kLane;
    Lanes sum[kFactors][kParts] = {};
    for (int64_t i = 0; i < rows; ++i) {
        Lanes value[kParts];
        for (int64_t part = 0; part < kParts; ++part) value[part] = load(tile + i * kColumnTile + part * kLane);
        for (int64_t k = 0; k < kFactors; ++k) {
            const Lanes factor = load(factors + (k * kChunk + i) * kLane);
            for (int64_t part = 0; part < kParts; ++part) sum[k][part] = sum[k][part] + factor * value[part];
        }
    }
    for (int64_t k = 0; k < kFactors; ++k) {
        alignas(64) float sums[kSpan];
        for (int64_t part = 0; part < kParts; ++part) store(sums + part * kLane, sum[k][part]);
        for (int64_t j = 0; j < columns; ++j) totals[k * total_stride + j] += sums[j];
    }
}

// out = v^T p for columns begin..end-1.
FXCOMP_BODY void project_back(const Matrix& m, const Factors& p, int64_t rank, float* out, int64_t begin, int64_t end) {
    alignas(64) float tile[kChunk * kColumnTile];
    alignas(64) float factors[kMaxRank * kChunk * kLane];
    for (int64_t k = 0; k < rank; ++k) std::fill(out + k * m.columns + begin, out + k * m.columns + end, 0.0f);
    for (int64_t row = 0; row < m.rows; row += kChunk) {
        const int64_t rows = std::min(kChunk, m.rows - row);
        for (int64_t k = 0; k < rank; ++k) spread(p.values + k * p.stride + row, rows, factors + k * kChunk * kLane);
        for (int64_t first = begin; first < end; first += kColumnTile) {
            const int64_t size = std::min(kColumnTile, end - first);
            for (int64_t i = 0; i < rows; ++i) load_row(m, row + i, first, size, tile + i * kColumnTile);
            for (int64_t j = 0; j < size; j += kSpan) {
                const int64_t columns = std::min(kSpan, size - j);
                int64_t k = 0;
                for (; k + 4 <= rank; k += 4) {
                    add_chunk<4>(tile + j, rows, factors + k * kChunk * kLane, columns, out + k * m.columns + first + j,
                                 m.columns);
                }
                for (; k < rank; ++k) {
                    add_chunk<1>(tile + j, rows, factors + k * kChunk * kLane, columns, out + k * m.columns + first + j,
                                 m.columns);
                }
            }
        }
    }
}

// p q^T at kRows rows and kParts * kLane columns; p is spread.
template <int64_t kRows, int64_t kParts>
FXCOMP_INLINE void expand(const float* p, const float* q, int64_t stride, int64_t rank, Lanes (&sum)[kRows][kParts]) {
    for (int64_t i = 0; i < kRows; ++i) {
        const Lanes factor = load(p + i * kLane);
        for (int64_t part = 0; part < kParts; ++part) sum[i][part] = factor * load(q + part * kLane);
    }
    for (int64_t k = 1; k < rank; ++k) {
        Lanes value[kParts];
        for (int64_t part = 0; part < kParts; ++part) value[part] = load(q + k * stride + part * kLane);
        for (int64_t i = 0; i < kRows; ++i) {
            const Lanes factor = load(p + (k * kRows + i) * kLane);
            for (int64_t part = 0; part < kParts; ++part) sum[i][part] = sum[i][part] + factor * value[part];
        }
    }
}

enum class Use { kWrite, kAdd, kLeaveOut };

// What becomes of p q^T: the mean, or the part of v that it leaves out, where that is finite.
template <Use kUse>
FXCOMP_INLINE void use(const float* FXCOMP_RESTRICT sums, const float* FXCOMP_RESTRICT bucket,
                       float* FXCOMP_RESTRICT out, int64_t size) {
    for (int64_t j = 0; j < size; ++j) {
        if (kUse == Use::kWrite) out[j] = sums[j];
        if (kUse == Use::kAdd) out[j] += sums[j];
        if (kUse == Use::kLeaveOut) {
            const float left_out = (bucket[j] + out[j]) - sums[j];
            out[j] = magnitude_bits(left_out) < kInfinityBits ? left_out : out[j];
        }
    }
}

template <Use kUse, int64_t kRows>
FXCOMP_INLINE void expand_rows(const float* bucket, const Factors& p, const Factors& q, int64_t rank, float* out,
                               int64_t columns, int64_t row) {
    constexpr int64_t kParts = 2, kWidth = kParts * kLane;
    alignas(64) float sums[kWidth];
    alignas(64) float factors[kMaxRank * kRows * kLane];
    for (int64_t k = 0; k < rank; ++k) spread(p.values + k * p.stride + row, kRows, factors + k * kRows * kLane);
    int64_t j = 0;
    for (; j + kWidth <= columns; j += kWidth) {
        Lanes sum[kRows][kParts];
        expand<kRows, kParts>(factors, q.values + j, q.stride, rank, sum);
        for (int64_t i = 0; i < kRows; ++i) {
            for (int64_t part = 0; part < kParts; ++part) store(sums + part * kLane, sum[i][part]);
            const int64_t at = (row + i) * columns + j;
            use<kUse>(sums, kUse == Use::kLeaveOut ? bucket + at : nullptr, out + at, kWidth);
        }
    }
    for (int64_t i = 0; i < kRows && j < columns; ++i) {
        const int64_t size = columns - j, at = (row + i) * columns + j;
        for (int64_t l = 0; l < size; ++l) sums[l] = p.values[row + i] * q.values[j + l];
        for (int64_t k = 1; k < rank; ++k) {
            for (int64_t l = 0; l < size; ++l) sums[l] += p.values[k * p.stride + row + i] * q.values[k * q.stride + j + l];
        }
        use<kUse>(sums, kUse == Use::kLeaveOut ? bucket + at : nullptr, out + at, size);
    }
}

template <Use kUse>
FXCOMP_INLINE void expand_all(const float* bucket, const Factors& p, const Factors& q, int64_t rank, float* out,
                              int64_t columns, int64_t begin, int64_t end) {
    int64_t row = begin;
    for (; row + 4 <= end; row += 4) expand_rows<kUse, 4>(bucket, p, q, rank, out, columns, row);
    for (; row < end; ++row) expand_rows<kUse, 1>(bucket, p, q, rank, out, columns, row);
}

// residual = v - p q^T for rows begin..end-1.
FXCOMP_BODY void leave_out(const float* bucket, const Factors& p, const Factors& q, int64_t rank, float* residual,
                           int64_t columns, int64_t begin, int64_t end) {
    expand_all<Use::kLeaveOut>(bucket, p, q, rank, residual, columns, begin, end);
}

// The mean of p q^T over the ranks for rows begin..end-1. `next` lies between two ranks' factors.
FXCOMP_BODY void reconstruct(const Factors& p, const Factors& q, int64_t next, int64_t ranks, int64_t rank, float* out,
                             int64_t columns, int64_t begin, int64_t end) {
    expand_all<Use::kWrite>(nullptr, p, q, rank, out, columns, begin, end);
    if (ranks == 1) return;
    for (int64_t other = 1; other < ranks; ++other) {
        const Factors factors{q.values + other * next, q.stride};
        expand_all<Use::kAdd>(nullptr, p, factors, rank, out, columns, begin, end);
    }
    const float factor = mean_factor(ranks);
    for (int64_t i = begin * columns; i < end * columns; ++i) out[i] *= factor;
}

// Dense segments

FXCOMP_BODY void encode_dense(const float* FXCOMP_RESTRICT bucket, float* FXCOMP_RESTRICT residual,
                              float* FXCOMP_RESTRICT payload, int64_t begin, int64_t end) {
    if (residual == nullptr) {
        for (int64_t i = begin; i < end; ++i) payload[i] = bucket[i];
        return;
    }
    for (int64_t i = begin; i < end; ++i) {
        const float value = bucket[i] + residual[i];
        payload[i] = value;
        residual[i] = magnitude_bits(value) < kInfinityBits ? 0.0f : residual[i];
    }
}

FXCOMP_BODY void decode_dense(const float* payloads, int64_t ranks, int64_t next, float* FXCOMP_RESTRICT out,
                              int64_t begin, int64_t end) {
    const float factor = mean_factor(ranks);
    for (int64_t i = begin; i < end; ++i) out[i] = payloads[i];
    for (int64_t rank = 1; rank < ranks; ++rank) {
        const float* FXCOMP_RESTRICT payload = payloads + rank * next;
        for (int64_t i = begin; i < end; ++i) out[i] += payload[i];
    }
    for (int64_t i = begin; ranks > 1 && i < end; ++i) out[i] *= factor;
}

int64_t grain_of(int64_t elements_a_unit) { return kGrain / std::max<int64_t>(elements_a_unit, 1); }

}  // namespace

FXCOMP_EXPORT void fxcomp_powersgd_propose(const float* bucket, const float* residual, const float* state, float* out,
                                           const int64_t* segments, const int64_t* columns, int64_t segment_count,
                                           int64_t rank) {
    Basis& basis = kept_basis();
    for (int64_t s = 0; s < segment_count; ++s) {
        const int64_t size = segments[s], width = columns[s];
        if (width > 0) {
            const Matrix m{bucket, residual, size / width, width};
            span(state, rank, width, true, basis);
            const Factors q = basis.factors();
            in_parallel(m.rows, grain_of(width),
                        [=](int64_t begin, int64_t end) { widest<project>(m, q, rank, out, begin, end); });
            out += rank * m.rows;
        }
        state += width > 0 ? rank * width : size;
        bucket += size;
        if (residual != nullptr) residual += size;
    }
}

FXCOMP_EXPORT void fxcomp_powersgd_encode(const float* bucket, float* residual, float* payload, const float*,
                                          const float* agreed, const int64_t* segments, const int64_t* columns,
                                          int64_t segment_count, int64_t rank) {
    Basis& basis = kept_basis();
    for (int64_t s = 0; s < segment_count; ++s) {
        const int64_t size = segments[s], width = columns[s];
        if (width == 0) {
            in_parallel(size, kGrain, [=](int64_t begin, int64_t end) {
                widest<encode_dense>(bucket, residual, payload, begin, end);
            });
        } else {
            const Matrix m{bucket, residual, size / width, width};
            span(agreed, rank, m.rows, false, basis);
            const Factors p = basis.factors(), q{payload, width};
            in_parallel(ceil_divide(width, kSpan), grain_of(m.rows * kSpan), [=](int64_t begin, int64_t end) {
                widest<project_back>(m, p, rank, payload, begin * kSpan, std::min(end * kSpan, width));
            });
            if (residual != nullptr) {
                in_parallel(m.rows, grain_of(width), [=](int64_t begin, int64_t end) {
                    widest<leave_out>(bucket, p, q, rank, residual, width, begin, end);
                });
            }
            agreed += rank * m.rows;
        }
        payload += width > 0 ? rank * width : size;
        bucket += size;
        if (residual != nullptr) residual += size;
    }
}

FXCOMP_EXPORT int32_t fxcomp_powersgd_decode(const float* payloads, int64_t ranks, float* out, const float* agreed,
                                             const float*, const int64_t* segments, const int64_t* columns,
                                             int64_t segment_count, int64_t rank) {
    Basis& basis = kept_basis();
    int64_t next = 0;
    for (int64_t s = 0; s < segment_count; ++s) next += columns[s] > 0 ? rank * columns[s] : segments[s];
    for (int64_t s = 0; s < segment_count; ++s) {
        const int64_t size = segments[s], width = columns[s];
        if (width == 0) {
            in_parallel(size, kGrain / ranks, [=](int64_t begin, int64_t end) {
                widest<decode_dense>(payloads, ranks, next, out, begin, end);
            });
        } else {
            const int64_t rows = size / width;
            span(agreed, rank, rows, false, basis);
            const Factors p = basis.factors(), q{payloads, width};
            in_parallel(rows, grain_of(width * ranks), [=](int64_t begin, int64_t end) {
                widest<reconstruct>(p, q, next, ranks, rank, out, width, begin, end);
            });
            // powersgd.py refuses columns that leave some over; nobody shall read memory that nobody wrote.
            std::fill(out + rows * width, out + size, float_of(kNanBits));
            agreed += rank * rows;
        }
        payloads += width > 0 ? rank * width : size;
        out += size;
    }
    return 1;
}
