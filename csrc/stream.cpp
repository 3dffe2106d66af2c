// Streaming stores of the width that the processor has: see stream.h.
#include "stream.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

namespace {

void stream_16(float* to, const float* from, int64_t lines) {
    for (int64_t i = 0; i < kLine * lines; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
}

__attribute__((target("avx"))) void stream_32(float* to, const float* from, int64_t lines) {
    for (int64_t i = 0; i < kLine * lines; i += 8) _mm256_stream_ps(to + i, _mm256_load_ps(from + i));
}

__attribute__((target("avx512f"))) void stream_64(float* to, const float* from, int64_t lines) {
    for (int64_t i = 0; i < kLine * lines; i += 16) _mm512_stream_ps(to + i, _mm512_load_ps(from + i));
}

using Streamer = void (*)(float*, const float*, int64_t);

Streamer widest() {
    if (__builtin_cpu_supports("avx512f")) return stream_64;
    return __builtin_cpu_supports("avx") ? stream_32 : stream_16;
}

const Streamer streamer = widest();

}  // namespace

void stream_lines(float* to, const float* from, int64_t lines) { streamer(to, from, lines); }

void finish_streaming() { _mm_sfence(); }
#else
void stream_lines(float* to, const float* from, int64_t lines) {
    std::memcpy(to, from, static_cast<size_t>(kLine * lines) * sizeof(float));
}

void finish_streaming() {}
#endif
