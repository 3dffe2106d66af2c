// Decode mutated payloads, encode values that break arithmetic, and search with numbers at the ends of their ranges:
// under AddressSanitizer and UndefinedBehaviorSanitizer nothing outside a buffer is read or written.
//
//     mutated SEED MUTATIONS      prints what was done; stops at the first finding
//
// Each payload is decoded at every instruction set of the processor, and with one thread and with several: all accept
// it or all refuse it, and give the same bits. Whoever accepts it has written every value. An encoder's own payload is
// never refused, and depends on what it was given alone.
#include <chrono>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "compressors.h"
#include "searches.h"

namespace {

constexpr uint32_t kUnwritten = 0x7f8bcdefu;  // a signalling NaN, which arithmetic never makes
constexpr int64_t kThreads[] = {1, 2, 4};

struct Count {
    int64_t mutations = 0, decoded = 0, refused = 0, encoded = 0;
};

std::vector<int32_t> levels_here() {
    std::vector<int32_t> found;
    for (int32_t level = 0; level <= 2; ++level) {
        if (CALL(fxcomp_set_level, level) == level) found.push_back(level);
    }
    return found;
}

// Denormals are flushed, or not: torch.set_flush_denormal.
void flush_denormals(bool flushes) {
#if defined(__SSE2__)
    _mm_setcsr(flushes ? _mm_getcsr() | 0x8040u : _mm_getcsr() & ~0x8040u);
#else
    static_cast<void>(flushes);
#endif
}

enum class Size { kSmall, kMedium, kShared, kStreamed };

Sizes draw_segments(Rng& rng, Size size) {
    static const Sizes kEdges{0,   1,   2,   3,   7,   8,   9,    15,   16,   17,   31,   33,   63,   64,   65,  127,
                              128, 129, 255, 256, 257, 511, 512,  513,  1023, 1024, 1025, 2047, 2048, 4095, 4096, 4097};
    Sizes found;
    if (size == Size::kStreamed) return {(int64_t{1} << 21) + rng.below(40), rng.below(3)};
    if (size == Size::kShared) found.push_back(rng.between(270000, 700000));
    if (size == Size::kMedium) found.push_back(rng.between(20000, 140000));
    for (int64_t left = rng.below(5); left > 0; --left) {
        found.insert(found.begin() + rng.below(static_cast<int64_t>(found.size()) + 1),
                     rng.one_in(3) ? rng.below(3000) : rng.of(kEdges));
    }
    return found;
}

void mutate(Rng& rng, uint8_t* bytes, int64_t size, const Sizes& fields) {
    for (int64_t times = rng.one_in(3) ? rng.between(2, 12) : 1; times > 0; --times) {
        const int64_t at = rng.below(size), room = size - at;
        switch (rng.below(7)) {
            case 0:
                bytes[at] ^= static_cast<uint8_t>(1 << rng.below(8));
                break;
            case 1:
                bytes[at] = static_cast<uint8_t>(rng.bits());
                break;
            case 2: {  // a word, aligned or not
                const uint32_t word = extreme(rng);
                const int64_t from = std::max<int64_t>(0, std::min(rng.one_in(2) ? at / 4 * 4 : at, size - 4));
                std::memcpy(bytes + from, &word, static_cast<size_t>(std::min<int64_t>(4, size - from)));
                break;
            }
            case 3:
                std::memset(bytes + at, rng.one_in(2) ? 0xff : 0, static_cast<size_t>(rng.below(room) + 1));
                break;
            case 4:
                for (int64_t i = 0; i < std::min<int64_t>(room, 1 + rng.below(64)); ++i) {
                    bytes[at + i] = static_cast<uint8_t>(rng.bits());
                }
                break;
            case 5: {  // one part in the place of another
                const int64_t from = rng.below(size), length = 1 + rng.below(size - std::max(at, from));
                std::memmove(bytes + at, bytes + from, static_cast<size_t>(length));
                break;
            }
            default:
                if (!fields.empty()) {
                    const int64_t field = rng.of(fields);
                    int32_t word;
                    std::memcpy(&word, bytes + field, 4);
                    const auto near = static_cast<int32_t>(static_cast<uint32_t>(word) +
                                                           static_cast<uint32_t>(rng.between(-2, 2)));
                    word = rng.one_in(2) ? static_cast<int32_t>(extreme(rng)) : near;
                    std::memcpy(bytes + field, &word, 4);
                }
        }
    }
}

bool same_floats(const Exact<float>& one, const Exact<float>& other) {
    for (int64_t i = 0; i < one.count(); ++i) {
        const float a = one.data()[i], b = other.data()[i];
        if (as_bits(a) != as_bits(b) && !(std::isnan(a) && std::isnan(b))) return false;
    }
    return true;
}

class Trial {
  public:
    Trial(Compressor& compressor, Rng& rng, const std::vector<int32_t>& levels, Count& count)
        : c_(compressor), rng_(rng), levels_(levels), count_(count), where_(compressor.name.c_str()) {}

    // Encode on some ranks, and decode what they send with mutations.
    void run(Size size, int64_t mutations) {
        Sizes segments = draw_segments(rng_, size);
        c_.draw(rng_, segments);
        n_ = sum_of(c_.segments);
        ranks_ = rng_.between(1, 4);
        flush_denormals(rng_.one_in(4));
        draw_agreed();
        Exact<uint8_t> payloads(ranks_ * c_.payload_bytes());
        for (int64_t rank = 0; rank < ranks_; ++rank) encode(payloads.data() + rank * c_.payload_bytes());
        check(decode(payloads, 0) == 1, "refuses a payload of its own", where_);
        for (int64_t k = 0; k < mutations; ++k) {
            const int64_t offset = rng_.below(64 / c_.unit()) * c_.unit();
            Exact<uint8_t> broken(payloads.count(), offset);
            broken.copy(payloads);
            if (broken.count() > 0) {
                const int64_t bytes = c_.payload_bytes(), rank = rng_.below(ranks_);
                mutate(rng_, broken.data() + rank * bytes, bytes, c_.fields());
            }
            ++count_.mutations;
            if (decode(broken, 4 * rng_.below(16)) == 0) ++count_.refused;
        }
        flush_denormals(false);
    }

  private:
    void draw_agreed() {
        agreed_ = std::make_unique<Exact<float>>(c_.agreed_values());
        if (agreed_->count() == 0) return;
        Exact<float> bucket(n_), residual(n_);
        Exact<uint8_t> state(c_.state_bytes());
        draw_values(rng_, bucket), draw_values(rng_, residual);
        if (state.count() > 0) c_.draw_state(rng_, state.data());
        at_some_level();
        c_.propose(bucket.data(), rng_.one_in(2) ? residual.data() : nullptr, state.data(), agreed_->data());
        if (rng_.one_in(3)) draw_values(rng_, *agreed_);  // another rank's proposal was in the sum
    }

    void at_some_level() {
        CALL(fxcomp_set_level, rng_.of(levels_));
        CALL(fxcomp_set_threads, kThreads[rng_.below(3)]);
    }

    void encode(uint8_t* payload) {
        const int64_t offset = rng_.below(64 / c_.unit()) * c_.unit();
        Exact<float> bucket(n_, 4 * rng_.below(16)), residual(n_, 4 * rng_.below(16)), again(n_, 4 * rng_.below(16));
        Exact<uint8_t> sent(c_.payload_bytes(), offset), sent_again(c_.payload_bytes());
        Exact<uint8_t> state(c_.state_bytes()), state_again(c_.state_bytes());
        draw_values(rng_, bucket), draw_values(rng_, residual);
        if (state.count() > 0) c_.draw_state(rng_, state.data());
        again.copy(residual), state_again.copy(state);
        sent.fill(0x00), sent_again.fill(0xff);
        const bool feeds_back = rng_.one_in(2);
        at_some_level();
        c_.encode({bucket.data(), feeds_back ? residual.data() : nullptr, sent.data(), state.data(), agreed_->data()});
        c_.encode({bucket.data(), feeds_back ? again.data() : nullptr, sent_again.data(), state_again.data(),
                   agreed_->data()});
        check(sent.equals(sent_again), "a payload depends on what its buffer held before", where_);
        check(residual.equals(again) && state.equals(state_again), "encodes twice with two results", where_);
        count_.encoded += 2;
        if (sent.count() > 0) std::memcpy(payload, sent.data(), static_cast<size_t>(sent.count()));
    }

    // Returns whether it is accepted.
    int32_t decode(const Exact<uint8_t>& payloads, int64_t offset) {
        Exact<float> first(n_, offset), out(n_, offset);
        int32_t accepted = -1;
        for (const int32_t level : levels_) {
            CALL(fxcomp_set_level, level);
            CALL(fxcomp_set_threads, kThreads[rng_.below(3)]);
            Exact<float>& to = accepted < 0 ? first : out;
            std::fill(to.data(), to.data() + n_, as_float(kUnwritten));
            const int32_t result = c_.decode(payloads.data(), ranks_, to.data(), agreed_->data(), nullptr);
            ++count_.decoded;
            check(result == 0 || result == 1, "returns neither 0 nor 1", where_);
            check(c_.may_refuse() || result == 1, "refuses", where_);
            check(accepted < 0 || result == accepted, "is refused by one instruction set or number of threads", where_);
            if (result == 1) {
                for (int64_t i = 0; i < n_; ++i) {
                    check(as_bits(to.data()[i]) != kUnwritten, "leaves a value unwritten", where_);
                }
                check(accepted < 0 || same_floats(first, to), "an instruction set or a thread changes bits", where_);
            }
            accepted = result;
        }
        return accepted;
    }

    Compressor& c_;
    Rng& rng_;
    const std::vector<int32_t>& levels_;
    Count& count_;
    const char* where_;
    int64_t n_ = 0, ranks_ = 1;
    std::unique_ptr<Exact<float>> agreed_;
};

void all_finite(Rng& rng, const std::vector<int32_t>& levels) {
    for (int64_t times = 0; times < 500; ++times) {
        Exact<float> values(times % 50 == 0 ? rng.between(270000, 400000) : rng.below(40000), 4 * rng.below(16));
        std::fill(values.data(), values.data() + values.count(), 1.0f);
        for (int64_t some = rng.below(3); some > 0 && values.count() > 0; --some) {
            values.data()[rng.below(values.count())] = as_float(extreme(rng));
        }
        const bool expected = std::all_of(values.data(), values.data() + values.count(),
                                          [](float value) { return std::isfinite(value); });
        for (const int32_t level : levels) {
            CALL(fxcomp_set_level, level);
            CALL(fxcomp_set_threads, kThreads[rng.below(3)]);
            const int32_t found = CALL(fxcomp_all_finite, values.data(), values.count());
            check(found == static_cast<int32_t>(expected), "is wrong", "all_finite");
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
    const int64_t mutations = argc > 2 ? std::atoll(argv[2]) : 1000;
    const std::string only = argc > 3 ? argv[3] : "";
    check(CALL(fxcomp_abi_version) == kAbi, "abi.h declares another version", "abi");
    const std::vector<int32_t> levels = levels_here();
    for (const int32_t level : levels) std::printf("level %d\n", level);
    int64_t total = 0, number = 0;
    for (const auto& compressor : all_compressors()) {
        ++number;
        if (!only.empty() && only != compressor->name) continue;
        const auto began = std::chrono::steady_clock::now();
        Rng rng(seed * 1000 + static_cast<uint64_t>(number));
        Count count;
        Trial(*compressor, rng, levels, count).run(Size::kStreamed, 3);
        const int64_t most = compressor->may_refuse() ? 4 * mutations : mutations;
        for (int64_t turn = 0; count.mutations < most; ++turn) {
            const Size size = turn % 100 == 50 ? Size::kShared : turn % 20 == 10 ? Size::kMedium : Size::kSmall;
            Trial(*compressor, rng, levels, count).run(size, size == Size::kSmall ? 30 : size == Size::kMedium ? 8 : 4);
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        std::printf("%-12s %7lld mutations, %7lld decoded, %6lld refused, %6lld encoded, %.1f s\n",
                    compressor->name.c_str(), static_cast<long long>(count.mutations),
                    static_cast<long long>(count.decoded), static_cast<long long>(count.refused),
                    static_cast<long long>(count.encoded), took.count());
        std::fflush(stdout);
        check(!compressor->may_refuse() || (count.refused > 0 && count.refused < count.mutations),
              "refuses no mutation, or all", compressor->name.c_str());
        total += count.mutations;
    }
    if (only.empty()) {
        Rng rng(seed);
        all_finite(rng, levels);
    }
    if (only.empty() || only == "search") search_mutated(seed, mutations);
    std::printf("mutations %lld\n", static_cast<long long>(total));
    print_calls();
    return 0;
}
