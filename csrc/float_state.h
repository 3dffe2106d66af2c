// How a thread rounds, and whether it flushes denormals: each thread has its own, and bits depend on it.
#pragma once

#if defined(__SSE2__) || defined(_M_X64)
#include <xmmintrin.h>

struct FloatState {
    unsigned control;
};

constexpr unsigned kStickyFlags = 0x3f;  // what happened so far, not how to compute

inline FloatState float_state() { return {_mm_getcsr() & ~kStickyFlags}; }

inline void set_float_state(const FloatState& state) { _mm_setcsr(state.control); }
#elif defined(__aarch64__) && defined(__GNUC__)
#include <cstdint>

struct FloatState {
    uint64_t control;
};

inline FloatState float_state() {
    FloatState state;
    asm volatile("mrs %0, fpcr" : "=r"(state.control));
    return state;
}

inline void set_float_state(const FloatState& state) { asm volatile("msr fpcr, %0" : : "r"(state.control)); }
#else
#include <cfenv>

struct FloatState {
    std::fenv_t environment;
};

inline FloatState float_state() {
    FloatState state;
    std::fegetenv(&state.environment);
    return state;
}

inline void set_float_state(const FloatState& state) { std::fesetenv(&state.environment); }
#endif
