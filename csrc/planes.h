// How cmax's codes lie in a payload: cut into planes of 8, 4, 2 or 1 bits, the lowest bits in the first plane, each
// packed as in blocks.h and filled up to whole bytes. fxcomp/compressors/cmax.py is the reference.
#pragma once

#include "blocks.h"

constexpr int64_t kMostChunks = kTile / 2;  // of a tile

// A code is a place in the lowest bits and a sign above: log2(chunk) + 1 bits.
FXCOMP_INLINE int64_t place_bits_of(int64_t chunk) { return count_trailing_zeros(static_cast<uint64_t>(chunk)); }

FXCOMP_INLINE int64_t plane_bytes(int64_t chunks, int64_t width) { return ceil_divide(chunks * width, 8); }

FXCOMP_INLINE int64_t bytes_of_codes(int64_t chunks, int64_t chunk) {
    const int64_t bits = place_bits_of(chunk) + 1;
    int64_t bytes = 0;
    for (int64_t width = 8; width > 0; width /= 2) bytes += (bits & width) != 0 ? plane_bytes(chunks, width) : 0;
    return bytes;
}

FXCOMP_INLINE int64_t bytes_of(int64_t n, int64_t chunk) {
    return n == 0 ? 0 : round_up(4 + bytes_of_codes(ceil_divide(n, chunk), chunk), 4);
}

template <int kWidth>
FXCOMP_INLINE void write_plane(const uint8_t* FXCOMP_RESTRICT codes, int64_t shift, uint8_t* plane, int64_t count) {
    using Word = typename Together<kWidth>::Word;
    constexpr int64_t kWords = kMostChunks / static_cast<int64_t>(sizeof(Word));
    alignas(64) Word words[kWords];
    auto* FXCOMP_RESTRICT const parts = reinterpret_cast<uint8_t*>(words);
    const int64_t bytes = plane_bytes(count, kWidth), padded = bytes * 8 / kWidth;
    for (int64_t i = 0; i < padded; ++i) parts[i] = (codes[i] >> shift) & ((1 << kWidth) - 1);
    pack<kWidth>(words, plane, bytes);
}

template <int kWidth>
FXCOMP_INLINE void read_plane(const uint8_t* plane, int64_t shift, uint8_t* FXCOMP_RESTRICT codes, int64_t count) {
    using Word = typename Together<kWidth>::Word;
    constexpr int64_t kWords = kMostChunks / static_cast<int64_t>(sizeof(Word));
    alignas(64) Word words[kWords];
    const int64_t bytes = plane_bytes(count, kWidth), padded = bytes * 8 / kWidth;
    unpack<kWidth>(plane, words, bytes);
    const auto* FXCOMP_RESTRICT const parts = reinterpret_cast<const uint8_t*>(words);
    for (int64_t i = 0; i < padded; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (parts[i] << shift));
}

// Calls body(width, plane, shift) for each plane, from its byte of chunk `first` on, a multiple of eight.
template <class Byte, class Body>
FXCOMP_INLINE void for_planes(Byte* planes, int64_t chunks, int64_t chunk, int64_t first, const Body& body) {
    const int64_t bits = place_bits_of(chunk) + 1;
    for (int64_t width = 8, shift = 0; width > 0; width /= 2) {
        if ((bits & width) == 0) continue;
        body(width, planes + first * width / 8, shift);
        planes += plane_bytes(chunks, width);
        shift += width;
    }
}

// Codes of `count` chunks from `first` on; up to seven more follow, of zeros, that fill up a byte.
FXCOMP_INLINE void write_codes(const uint8_t* codes, uint8_t* planes, int64_t chunks, int64_t chunk, int64_t first,
                               int64_t count) {
    for_planes(planes, chunks, chunk, first, [=](int64_t width, uint8_t* plane, int64_t shift) FXCOMP_LAMBDA {
        if (width == 8) std::memcpy(plane, codes, static_cast<size_t>(count));
        if (width == 4) write_plane<4>(codes, shift, plane, count);
        if (width == 2) write_plane<2>(codes, shift, plane, count);
        if (width == 1) write_plane<1>(codes, shift, plane, count);
    });
}

FXCOMP_INLINE void read_codes(const uint8_t* planes, int64_t chunks, int64_t chunk, int64_t first, int64_t count,
                              uint8_t* codes) {
    std::memset(codes, 0, static_cast<size_t>(round_up(count, 8)));
    for_planes(planes, chunks, chunk, first, [=](int64_t width, const uint8_t* plane, int64_t shift) FXCOMP_LAMBDA {
        if (width == 8) std::memcpy(codes, plane, static_cast<size_t>(count));
        if (width == 4) read_plane<4>(plane, shift, codes, count);
        if (width == 2) read_plane<2>(plane, shift, codes, count);
        if (width == 1) read_plane<1>(plane, shift, codes, count);
    });
}
