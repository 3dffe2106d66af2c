// Write a long output past the caches.
//
// A plain store first reads the line that it writes to, so decoding moves twice the bytes that it makes. A streaming
// store does not, but the line must be written whole: values wait in a short buffer until it is full.
#pragma once

#include "common.h"

// Whether stream_lines is more than a copy.
#if defined(__x86_64__) && defined(__GNUC__)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// From here on an output is streamed: who reads it would not find it in the caches anyway.
constexpr int64_t kStreamedElements = int64_t{1} << 21;  // 8 MB

constexpr int64_t kLine = 16;  // floats in 64 bytes

// Copies whole lines, both ends aligned to 64 bytes, with the widest streaming stores that the processor has: those of
// 64 bytes write 2.5 times as fast as those of 16.  (measured, Zen 4, 2026-11)
void stream_lines(float* to, const float* from, int64_t lines);

// Other threads see what was streamed before this.
void finish_streaming();

// Writes out[0], out[1], ... in order: fill `next()` with up to kMost values, then `commit` them.
template <int64_t kMost>
struct LineWriter {
    alignas(64) float buffer[kLine + kMost];
    float* line;      // where the buffer goes, whole lines
    int64_t held;     // values in the buffer
    int64_t missing;  // of them, values in front that are another's
};

template <int64_t kMost>
FXCOMP_INLINE void start_lines(LineWriter<kMost>& writer, float* out) {
    writer.missing = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) / sizeof(float) % kLine);
    writer.held = writer.missing;
    writer.line = out - writer.missing;
}

template <int64_t kMost>
FXCOMP_INLINE float* next_values(LineWriter<kMost>& writer) {
    return writer.buffer + writer.held;
}

template <int64_t kMost>
FXCOMP_INLINE void commit_values(LineWriter<kMost>& writer, int64_t size) {
    writer.held += size;
    const int64_t lines = writer.held / kLine;
    if (lines == 0) return;
    int64_t i = 0;
    if (writer.missing > 0) {
        std::memcpy(writer.line + writer.missing, writer.buffer + writer.missing,
                    static_cast<size_t>(kLine - writer.missing) * sizeof(float));
        writer.missing = 0;
        i = 1;
    }
    stream_lines(writer.line + kLine * i, writer.buffer + kLine * i, lines - i);
    writer.line += kLine * lines;
    writer.held -= kLine * lines;
    if (writer.held > 0) std::memcpy(writer.buffer, writer.buffer + kLine * lines, kLine * sizeof(float));
}

// Writes the last line, and lets other threads see all.
template <int64_t kMost>
FXCOMP_INLINE void finish_lines(LineWriter<kMost>& writer) {
    if (writer.held > writer.missing) {
        std::memcpy(writer.line + writer.missing, writer.buffer + writer.missing,
                    static_cast<size_t>(writer.held - writer.missing) * sizeof(float));
    }
    finish_streaming();
}
