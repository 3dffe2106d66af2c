// Ascending places in few bytes: fxcomp/compressors/places.py has the forms and the layout.
#pragma once

#include "common.h"

constexpr int kBitmap = 0;  // else: how many low bits of a place are written down as they are, 8 or 16

struct PlacesLayout {
    int form;
    int64_t low_bytes, bit_bytes;

    int64_t bytes() const { return low_bytes + bit_bytes; }
};

FXCOMP_INLINE PlacesLayout places_layout(int64_t n, int64_t k) {
    if (k == 0) return {kBitmap, 0, 0};
    PlacesLayout best{kBitmap, 0, ceil_divide(n, 8)};
    for (int form = 8; form <= 16; form += 8) {
        const PlacesLayout other{form, k * form / 8, ceil_divide(k + ((n - 1) >> form), 8)};
        if (other.bytes() < best.bytes()) best = other;
    }
    return best;
}

// Calls work with the form as a constant of the compiler.
template <class Work>
FXCOMP_INLINE auto with_form(const PlacesLayout& layout, const Work& work) {
    if (layout.form == kBitmap) return work(std::integral_constant<int, kBitmap>{});
    if (layout.form == 8) return work(std::integral_constant<int, 8>{});
    return work(std::integral_constant<int, 16>{});
}

FXCOMP_INLINE int64_t count_ones(uint64_t bits) {
#if defined(__GNUC__)
    return __builtin_popcountll(bits);
#else
    int64_t ones = 0;
    for (; bits != 0; bits &= bits - 1) ++ones;
    return ones;
#endif
}

// 64 bits of a bit string that need not be a multiple of eight bytes long.
FXCOMP_INLINE uint64_t load_bits(const uint8_t* bits, int64_t bytes, int64_t word) {
    uint64_t result = 0;
    if (8 * word + 8 <= bytes) {
        std::memcpy(&result, bits + 8 * word, 8);
    } else {
        for (int64_t i = 8 * word; i < bytes; ++i) result |= static_cast<uint64_t>(bits[i]) << (8 * (i - 8 * word));
    }
    return result;
}

// Adds ones to a bit string.
FXCOMP_INLINE void add_bits(uint8_t* bits, int64_t bytes, int64_t word, uint64_t ones) {
    for (int64_t i = 8 * word; i < std::min(bytes, 8 * word + 8); ++i, ones >>= 8) bits[i] |= static_cast<uint8_t>(ones);
}

// Writes the places from number `next` on of a section whose bit string was zeroed. Several writers may each write a
// stretch of one section: the words at a stretch's ends may be shared, so `finish` adds them, one writer after the
// other.
template <int kForm>
struct PlacesWriter {
    uint8_t* low;
    uint8_t* bits;
    int64_t bit_bytes;
    int64_t next;
    int64_t word = -1, first_word = -1;
    uint64_t ones = 0, first_ones = 0;

    PlacesWriter(uint8_t* section, const PlacesLayout& layout, int64_t from)
        : low(section), bits(section + layout.low_bytes), bit_bytes(layout.bit_bytes), next(from) {}

    // Without a branch on `is_meant`: a place that is not meant is overwritten by the next.
    FXCOMP_METHOD void write(int32_t place, bool is_meant) {
        int64_t at = place;
        if (kForm == 8) {
            low[next] = static_cast<uint8_t>(place);
            at = (place >> 8) + next;
        } else if (kForm == 16) {
            const uint16_t part = static_cast<uint16_t>(place);
            std::memcpy(low + 2 * next, &part, 2);
            at = (place >> 16) + next;
        }
        if ((at >> 6) != word) {
            put_word();
            word = at >> 6;
            ones = 0;
        }
        ones |= static_cast<uint64_t>(is_meant) << (at & 63);
        next += is_meant;
    }

    FXCOMP_METHOD void put_word() {
        if (word < 0) return;
        if (first_word < 0) {
            first_word = word;
            first_ones = ones;
        } else {
            std::memcpy(bits + 8 * word, &ones, 8);
        }
    }

    void finish() const {
        if (first_word >= 0) add_bits(bits, bit_bytes, first_word, first_ones);
        if (word >= 0) add_bits(bits, bit_bytes, word, ones);
    }
};

// Where reading a section has got to: before its `number`-th place.
struct PlacesCursor {
    int64_t number = 0, word = -1;
    uint64_t ones = 0;  // of this word, those not yet read
};

// Reads a section of k places. The bytes may come from anywhere: places are checked by whoever uses them.
template <int kForm>
struct PlacesReader {
    const uint8_t* low;
    const uint8_t* bits;
    int64_t bit_bytes, k;

    PlacesReader(const uint8_t* section, const PlacesLayout& layout, int64_t count)
        : low(section), bits(section + layout.low_bytes), bit_bytes(layout.bit_bytes), k(count) {}

    // Goes to the next word that has a one; false at the end.
    FXCOMP_METHOD bool seek_one(PlacesCursor& cursor) const {
        while (cursor.ones == 0) {
            if (8 * (cursor.word + 1) >= bit_bytes) return false;
            cursor.ones = load_bits(bits, bit_bytes, ++cursor.word);
        }
        return true;
    }

    // Advances to the next word that has a place. Returns false at the end or after k places.
    FXCOMP_METHOD bool seek(PlacesCursor& cursor) const { return seek_one(cursor) && cursor.number < k; }

    // The place that comes next, behind a `seek` that found one.
    FXCOMP_METHOD int64_t place(const PlacesCursor& cursor) const {
        const int64_t at = 64 * cursor.word + count_trailing_zeros(cursor.ones);
        if (kForm == 8) return ((at - cursor.number) << 8) | low[cursor.number];
        if (kForm == 16) {
            uint16_t part;
            std::memcpy(&part, low + 2 * cursor.number, 2);
            return ((at - cursor.number) << 16) | part;
        }
        return at;
    }

    FXCOMP_METHOD void advance(PlacesCursor& cursor) const {
        cursor.ones &= cursor.ones - 1;
        ++cursor.number;
    }

    // The cursor before the first place that is not below `start`: whole words are skipped by counting their ones.
    FXCOMP_METHOD PlacesCursor find(int64_t start) const {
        PlacesCursor cursor;
        while (8 * (cursor.word + 1) < bit_bytes) {
            const uint64_t ones = load_bits(bits, bit_bytes, cursor.word + 1);
            const int64_t number = cursor.number + count_ones(ones), next = 64 * (cursor.word + 2);
            const bool is_below = kForm == kBitmap ? next <= start : next - number < (start >> kForm);
            if (!is_below) break;
            cursor.number = number;
            ++cursor.word;
        }
        while (seek(cursor) && place(cursor) < start) advance(cursor);
        return cursor;
    }
};
