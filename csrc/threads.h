// Share a kernel's work among threads: they start once, sleep between kernels, and allocate nothing.
//
// Work is cut where no result depends on the cut (between blocks, between segments, between tiles), and every thread
// rounds and flushes denormals as the caller does, so the number of threads never changes a bit.
#pragma once

#include <algorithm>
#include <cstdint>

// How many threads a kernel may use, the caller's included; 1 at first.
int64_t thread_budget();

// Calls body(context, part) for part = 0..parts-1, on as many threads as the budget allows, and returns when all are
// done. Called from within a body, or while another thread's kernel has the pool, it runs all parts itself.
void run_parts(int64_t parts, void (*body)(void*, int64_t), void* context);

// Ranges a thread, at most: a thread that wakes up late leaves the others more of them.
constexpr int64_t kRangesEach = 4;

// So few are done before another thread has woken up.
constexpr int64_t kFewRanges = 3;

// Cuts 0..units-1 into ranges and calls body(begin, end) for each, in parallel where it pays: `grain` units are work of
// about 20 us, and waking another thread takes as long as one or two ranges.
template <class Body>
inline void in_parallel(int64_t units, int64_t grain, const Body& body) {
    const int64_t threads = thread_budget(), ranges = units / std::max<int64_t>(grain, 1);
    const int64_t parts = threads == 1 || ranges <= kFewRanges ? 1 : std::clamp<int64_t>(ranges, 1, kRangesEach * threads);
    if (parts == 1) {
        if (units > 0) body(int64_t{0}, units);
        return;
    }
    struct Context {
        const Body& body;
        int64_t units, parts;
    } context{body, units, parts};
    run_parts(
        parts,
        [](void* raw, int64_t part) {
            const Context& c = *static_cast<Context*>(raw);
            const int64_t begin = c.units * part / c.parts, end = c.units * (part + 1) / c.parts;
            if (begin < end) c.body(begin, end);
        },
        &context);
}

// Calls body(part) for part = 0..parts-1: for work in several stages that keeps something for each part.
template <class Body>
inline void for_parts(int64_t parts, const Body& body) {
    struct Context {
        const Body& body;
    } context{body};
    run_parts(parts, [](void* raw, int64_t part) { static_cast<Context*>(raw)->body(part); }, &context);
}
