// Random numbers, buffers of exactly the size asked for, and values that break arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

class Rng {
  public:
    explicit Rng(uint64_t seed) : state_(seed) {}

    uint64_t bits() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }

    int64_t below(int64_t n) { return n <= 1 ? 0 : static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }

    int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }

    bool one_in(int64_t n) { return below(n) == 0; }

    double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

    template <class T>
    T of(const std::vector<T>& values) {
        return values[static_cast<size_t>(below(static_cast<int64_t>(values.size())))];
    }

  private:
    uint64_t state_;
};

// AddressSanitizer reports the first byte after the buffer. Null if empty, as in torch. `offset` bytes precede it.
template <class T>
class Exact {
  public:
    explicit Exact(int64_t count, int64_t offset = 0)
        : count_(count), offset_(offset), bytes_(std::malloc(static_cast<size_t>(size() + offset)), std::free) {}

    Exact(const std::vector<T>& values) : Exact(static_cast<int64_t>(values.size())) {
        std::copy(values.begin(), values.end(), data());
    }

    T* data() const { return count_ == 0 ? nullptr : reinterpret_cast<T*>(static_cast<char*>(bytes_.get()) + offset_); }

    int64_t count() const { return count_; }

    int64_t size() const { return count_ * static_cast<int64_t>(sizeof(T)); }

    void copy(const Exact& other) {
        if (count_ > 0) std::memcpy(data(), other.data(), static_cast<size_t>(size()));
    }

    void fill(int byte) {
        if (count_ > 0) std::memset(data(), byte, static_cast<size_t>(size()));
    }

    bool equals(const Exact& other) const {
        return count_ == 0 || std::memcmp(data(), other.data(), static_cast<size_t>(size())) == 0;
    }

  private:
    int64_t count_, offset_;
    std::unique_ptr<void, void (*)(void*)> bytes_;
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// As numbers of 32 bits and as fp32: ends of ranges, infinities, NaN of each kind, denormals.
inline uint32_t extreme(Rng& rng) {
    static const std::vector<uint32_t> kExtremes{
        0u,          1u,          2u,          0xffffffffu, 0xfffffffeu, 0x80000000u, 0x80000001u, 0x7fffffffu,
        0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f800001u, 0x7f7fffffu, 0xff7fffffu, 0x007fffffu,
        0x00800000u, 0x807fffffu, 0x3f800000u, 0xbf800000u, 0x4effffffu, 0x4f000000u, 0xcf000001u, 0x5f000000u};
    return rng.one_in(4) ? static_cast<uint32_t>(rng.bits() >> rng.below(64)) : rng.of(kExtremes);
}

// A gradient of one of many kinds.
inline void draw_values(Rng& rng, Exact<float>& values) {
    const int64_t kind = rng.below(12);
    const double scale = std::pow(10.0, static_cast<double>(rng.between(-45, 38)));
    const auto same = static_cast<float>(scale);
    for (int64_t i = 0; i < values.count(); ++i) {
        const double normal = (rng.uniform() + rng.uniform() + rng.uniform() - 1.5) * 2.0;
        float value = static_cast<float>(normal);
        if (kind == 1) value = 0.0f;
        if (kind == 2) value = rng.one_in(50) ? value : 0.0f;
        if (kind == 3) value = rng.one_in(2) ? same : -same;
        if (kind == 4) value = static_cast<float>(std::min(std::max(normal * scale, -3e38), 3e38));
        if (kind == 5) value = as_float(static_cast<uint32_t>(rng.below(1000)) | (rng.one_in(2) ? 0x80000000u : 0u));
        if (kind == 6) value = as_float(static_cast<uint32_t>(rng.bits()));
        if (kind == 7) value = as_float(extreme(rng));
        if (kind == 8 && rng.one_in(30)) value = as_float(extreme(rng));
        if (kind == 9) value = static_cast<float>(normal * std::exp(3.0 * normal));
        values.data()[i] = value;
    }
    if (kind >= 10 && values.count() > 0) {
        values.data()[rng.below(values.count())] = as_float(extreme(rng));
    }
}

[[noreturn]] inline void fail(const char* what, const char* where) {
    std::printf("wrong: %s: %s\n", where, what);
    std::fflush(stdout);
    std::abort();
}

inline void check(bool is_right, const char* what, const char* where) {
    if (!is_right) fail(what, where);
}
