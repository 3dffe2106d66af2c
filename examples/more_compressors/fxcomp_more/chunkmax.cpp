// The value of largest magnitude of each chunk: chunkmax.py has the formulas and the layout, and gives the same bits.
//
// Plain functions for ctypes, without torch: chunkmax.py passes pointers to tensors that fxcomp has checked.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <cstring>

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

constexpr uint32_t kInfinityBits = 0x7f800000u;

// The part of the payload that one segment of n values has.
struct Layout {
    int64_t n, chunk;

    int64_t chunks() const { return (n + chunk - 1) / chunk; }
    int64_t place_bytes() const { return chunk <= 256 ? 1 : 2; }
    int64_t used() const { return chunks() * (4 + place_bytes()); }
    int64_t bytes() const { return (used() + 3) / 4 * 4; }
};

// Not finite from kInfinityBits on, and NaN is the largest.
uint32_t magnitude_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffffu;
}

void encode_segment(const float* bucket, float* residual, uint8_t* payload, const Layout& layout) {
    uint8_t* const places = payload + 4 * layout.chunks();
    std::memset(payload + layout.used(), 0, static_cast<size_t>(layout.bytes() - layout.used()));
    for (int64_t number = 0; number < layout.chunks(); ++number) {
        const int64_t begin = number * layout.chunk;
        const int64_t end = begin + layout.chunk < layout.n ? begin + layout.chunk : layout.n;
        uint16_t place = 0;
        float largest = 0.0f;
        for (int64_t i = begin; i < end; ++i) {
            const float value = residual != nullptr ? bucket[i] + residual[i] : bucket[i];
            if (i == begin || magnitude_bits(value) > magnitude_bits(largest)) {
                largest = value;
                place = static_cast<uint16_t>(i - begin);
            }
            if (residual != nullptr && magnitude_bits(value) < kInfinityBits) residual[i] = value;
        }
        if (residual != nullptr && magnitude_bits(largest) < kInfinityBits) residual[begin + place] = 0.0f;
        std::memcpy(payload + 4 * number, &largest, sizeof largest);
        if (layout.place_bytes() == 1) {
            places[number] = static_cast<uint8_t>(place);
        } else {
            std::memcpy(places + 2 * number, &place, sizeof place);
        }
    }
}

// Adds one rank's values; false if a place lies outside its chunk.
bool add_segment(const uint8_t* payload, const Layout& layout, float* out) {
    const uint8_t* const places = payload + 4 * layout.chunks();
    for (int64_t number = 0; number < layout.chunks(); ++number) {
        uint16_t place = places[layout.place_bytes() * number];
        if (layout.place_bytes() == 2) std::memcpy(&place, places + 2 * number, sizeof place);
        const int64_t at = number * layout.chunk + place;
        if (place >= layout.chunk || at >= layout.n) return false;
        float value;
        std::memcpy(&value, payload + 4 * number, sizeof value);
        out[at] += value;
    }
    return true;
}

}  // namespace

EXPORT void chunkmax_encode(const float* bucket, float* residual, uint8_t* payload, const int64_t* segments,
                            int64_t segment_count, int64_t chunk) {
    for (int64_t s = 0; s < segment_count; ++s) {
        const Layout layout{segments[s], chunk};
        encode_segment(bucket, residual, payload, layout);
        bucket += layout.n;
        if (residual != nullptr) residual += layout.n;
        payload += layout.bytes();
    }
}

// Returns 0 if a place lies outside its chunk: that payload was not made by chunkmax_encode.
EXPORT int32_t chunkmax_decode(const uint8_t* payloads, int64_t ranks, float* out, const int64_t* segments,
                               int64_t segment_count, int64_t chunk) {
    int64_t stride = 0;
    for (int64_t s = 0; s < segment_count; ++s) stride += Layout{segments[s], chunk}.bytes();
    const auto factor = static_cast<float>(1.0 / static_cast<double>(ranks));
    for (int64_t s = 0; s < segment_count; ++s) {
        const Layout layout{segments[s], chunk};
        std::memset(out, 0, static_cast<size_t>(layout.n) * sizeof(float));
        for (int64_t rank = 0; rank < ranks; ++rank) {
            if (!add_segment(payloads + rank * stride, layout, out)) return 0;
        }
        for (int64_t i = 0; i < layout.n; ++i) out[i] *= factor;
        out += layout.n;
        payloads += layout.bytes();
    }
    return 1;
}

// Lets Python find the library as a module, fxcomp_more._chunkmax.
PyMODINIT_FUNC PyInit__chunkmax() {
    static PyModuleDef definition{};
    definition.m_base = PyModuleDef_HEAD_INIT;
    definition.m_name = "_chunkmax";
    definition.m_size = -1;
    return PyModule_Create(&definition);
}
