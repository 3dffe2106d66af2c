// Which instruction sets the processor has: see levels.h.
#include "levels.h"

#include <algorithm>
#include <atomic>

#include "common.h"

namespace {

Level widest_level() {
#if defined(FXCOMP_HAS_LEVELS)
    __builtin_cpu_init();
    const bool has_bits =
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    if (!has_bits || !__builtin_cpu_supports("avx2")) return kBaseline;
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl");
    return has_avx512 ? kAvx512 : kAvx2;
#else
    return kBaseline;
#endif
}

std::atomic<Level> level{widest_level()};

}  // namespace

Level current_level() { return level.load(std::memory_order_relaxed); }

// Makes kernels run at this level, or the highest below it that the processor has; returns that. For tests: a level
// changes no bit.
FXCOMP_EXPORT int32_t fxcomp_set_level(int32_t most) {
    level.store(static_cast<Level>(std::clamp<int32_t>(most, kBaseline, widest_level())), std::memory_order_relaxed);
    return current_level();
}
