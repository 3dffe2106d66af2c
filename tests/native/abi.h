// The C ABI of csrc/, as fxcomp/compressors/kernels.py calls it, and a count of the calls.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>

#include "plan_value.h"

constexpr int32_t kAbi = 16;  // the version of these declarations

struct SearchLimits {
    int64_t evaluations;
    int32_t options, apart, dense_only, pairs, borders;
    double price;
};

extern "C" {
int32_t fxcomp_abi_version();
int32_t fxcomp_set_level(int32_t most);
void fxcomp_set_threads(int64_t threads);
int32_t fxcomp_all_finite(const float* values, int64_t elements);

#define FXCOMP_CAST(name)                                                                                       \
    void fxcomp_##name##_encode(const float* bucket, float* residual, void* payload, const void*, const void*, \
                                int64_t elements);                                                              \
    int32_t fxcomp_##name##_decode(const void* payloads, int64_t ranks, float* out, const void*, const void*,  \
                                   int64_t elements);
FXCOMP_CAST(bf16)
FXCOMP_CAST(exact_bf16)
FXCOMP_CAST(fp16)
FXCOMP_CAST(exact_fp16)
FXCOMP_CAST(exact_fp32)

#define FXCOMP_BLOCKS(name)                                                                                           \
    void fxcomp_##name##_encode(const float* bucket, float* residual, void* payload, int64_t* state, const void*,    \
                                const int64_t* segments, int64_t segment_count, int64_t block);                      \
    int32_t fxcomp_##name##_decode(const void* payloads, int64_t ranks, float* out, const void*, const void*,        \
                                   const int64_t* segments, int64_t segment_count, int64_t block);
FXCOMP_BLOCKS(int8)
FXCOMP_BLOCKS(int4)
FXCOMP_BLOCKS(int2)
FXCOMP_BLOCKS(sign)
FXCOMP_BLOCKS(cmax)

void fxcomp_topk_encode(const float* bucket, float* residual, void* payload, const void*, const void*,
                        const int64_t* segments, const int64_t* ks, int64_t segment_count);
int32_t fxcomp_topk_decode(const void* payloads, int64_t ranks, float* out, const void*, const void*,
                           const int64_t* segments, const int64_t* ks, int64_t segment_count);

void fxcomp_sidco_encode(const float* bucket, float* residual, void* payload, float* state, const void*,
                         const int64_t* segments, const int64_t* ks, const int64_t* slots, int64_t segment_count,
                         const int64_t* strides, const int64_t* thin_strides, int64_t fit, int64_t most_stages);
int32_t fxcomp_sidco_decode(const void* payloads, int64_t ranks, float* out, const void*, const void*,
                            const int64_t* segments, const int64_t* ks, const int64_t* slots, int64_t segment_count);

void fxcomp_powersgd_propose(const float* bucket, const float* residual, const float* state, float* out,
                             const int64_t* segments, const int64_t* columns, int64_t segment_count, int64_t rank);
void fxcomp_powersgd_encode(const float* bucket, float* residual, void* payload, const float* state,
                            const float* agreed, const int64_t* segments, const int64_t* columns,
                            int64_t segment_count, int64_t rank);
int32_t fxcomp_powersgd_decode(const void* payloads, int64_t ranks, float* out, const float* agreed,
                               const float* state, const int64_t* segments, const int64_t* columns,
                               int64_t segment_count, int64_t rank);

double fxcomp_step_time(int32_t size, const int32_t* streams, const double* durations, const double* demands,
                        const double* beside, const int32_t* counts, const int32_t* after, double processors);
void* fxcomp_search_open(const fxcomp::Problem* problem);
void fxcomp_search_close(void* search);
void fxcomp_search_evaluate(void* search, int32_t plans, const int32_t* counts, const fxcomp::Part* parts,
                            fxcomp::Value* values);
void fxcomp_search_with_options(void* search, int32_t count, const fxcomp::Part* parts, int32_t times,
                                const int32_t* options, fxcomp::Value* values);
void fxcomp_search_others(void* search, int32_t count, const fxcomp::Part* parts, fxcomp::Value* values);
int32_t fxcomp_search_improve(void* search, int32_t count, fxcomp::Part* parts, const SearchLimits* limits,
                              int64_t* evaluations);
}

inline std::map<std::string, int64_t>& calls() {
    static std::map<std::string, int64_t> made;
    return made;
}

// Calls a kernel and counts the call. test_sanitizers.py compares the counted names with the library's exports.
#define CALL(name, ...)                              \
    [&] {                                            \
        static int64_t& made = calls()[#name];       \
        ++made;                                      \
        return name(__VA_ARGS__);                    \
    }()

inline void print_calls() {
    for (const auto& [name, made] : calls()) std::printf("calls %s %lld\n", name.c_str(), static_cast<long long>(made));
}
