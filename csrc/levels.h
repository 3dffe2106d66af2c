// Compile a body for several instruction sets, and call it for the widest that the processor has.
//
//     FXCOMP_BODY void encode(const float* bucket, uint16_t* payload, int64_t begin, int64_t end) { ... }
//
//     widest<encode>(bucket, payload, begin, end);
//
// A kernel is an exported function that checks nothing, cuts its work with in_parallel (threads.h), and calls a body for
// each range. The lambda between them, and whatever a body calls that is not inlined, is compiled for the baseline.
//
// A body is inlined into a function with a `target` attribute for each level. GCC's target_clones would be shorter, but
// knows sets of features only from GCC 12 on, needs glibc, and clang has it for few systems.
#pragma once

#include <cstdint>
#include <type_traits>

// The level that kernels run at: that of the processor, unless fxcomp_set_level lowered it.
enum Level : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };
Level current_level();

#if defined(__x86_64__) && defined(__GNUC__) && !defined(FXCOMP_ONE_INSTRUCTION_SET)
#define FXCOMP_HAS_LEVELS 1
// What the processor is asked for in levels.cpp, and no more: fused multiply-add is not wanted (common.h).
#define FXCOMP_AVX2 __attribute__((noinline, target("avx2,bmi,bmi2,popcnt")))
#define FXCOMP_AVX512 __attribute__((noinline, target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,bmi,bmi2,popcnt")))
#endif

#if defined(__GNUC__)
#define FXCOMP_BODY static inline __attribute__((always_inline))
#else
#define FXCOMP_BODY static inline
#endif

template <auto kBody>
struct Versions;

template <class Result, class... Arguments, Result (*kBody)(Arguments...)>
struct Versions<kBody> {
#if defined(FXCOMP_HAS_LEVELS)
    FXCOMP_AVX512 static Result avx512(Arguments... arguments) { return kBody(arguments...); }
    FXCOMP_AVX2 static Result avx2(Arguments... arguments) { return kBody(arguments...); }
#endif
#if defined(__GNUC__)
    __attribute__((noinline))
#endif
    static Result baseline(Arguments... arguments) {
        return kBody(arguments...);
    }
};

template <auto kBody, class... Arguments>
inline auto widest(Arguments&&... arguments) {
#if defined(FXCOMP_HAS_LEVELS)
    switch (current_level()) {
        case kAvx512:
            return Versions<kBody>::avx512(arguments...);
        case kAvx2:
            return Versions<kBody>::avx2(arguments...);
        default:
            break;
    }
#endif
    return Versions<kBody>::baseline(arguments...);
}
