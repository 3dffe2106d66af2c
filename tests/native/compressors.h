// Every compressor with kernels: what is drawn for it, the sizes that Python gives it, and its calls.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "drawn.h"

using Sizes = std::vector<int64_t>;

inline int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t sum_of(const Sizes& sizes) {
    int64_t sum = 0;
    for (const int64_t size : sizes) sum += size;
    return sum;
}

struct Encoded {
    const float* bucket;
    float* residual;
    void* payload;
    void* state;
    const float* agreed;
};

class Compressor {
  public:
    explicit Compressor(std::string named) : name(std::move(named)) {}
    virtual ~Compressor() = default;

    // Draws parameters. May change the segments to sizes that they allow.
    virtual void draw(Rng& rng, Sizes& drawn) { static_cast<void>(rng), set(drawn); }
    virtual int64_t payload_bytes() const = 0;
    virtual int64_t unit() const { return 1; }  // bytes of a payload's element
    virtual int64_t state_bytes() const { return 0; }
    virtual int64_t agreed_values() const { return 0; }
    virtual void draw_state(Rng&, void*) {}
    virtual void propose(const float*, const float*, const void*, float*) {}
    virtual void encode(const Encoded& given) = 0;
    virtual int32_t decode(const void* payloads, int64_t ranks, float* out, const float* agreed, const void* state) = 0;
    // Where a payload has a header or a scale.
    virtual Sizes fields() const { return {}; }
    // Places or counts come from the payload, and what they may not be is refused.
    virtual bool may_refuse() const { return false; }

    std::string name;
    Sizes segments;

  protected:
    void set(const Sizes& drawn) {
        segments = drawn;
        given_ = std::make_unique<Exact<int64_t>>(drawn);
    }

    const int64_t* sizes() const { return given_->data(); }
    int64_t count() const { return static_cast<int64_t>(segments.size()); }
    int64_t values() const { return sum_of(segments); }

  private:
    std::unique_ptr<Exact<int64_t>> given_;
};

#define CAST(kind, bytes)                                                                                             \
    class Cast_##kind : public Compressor {                                                                           \
      public:                                                                                                         \
        Cast_##kind() : Compressor(#kind) {}                                                                          \
        int64_t payload_bytes() const override { return bytes * values(); }                                           \
        int64_t unit() const override { return bytes; }                                                               \
        void encode(const Encoded& given) override {                                                                  \
            CALL(fxcomp_##kind##_encode, given.bucket, given.residual, given.payload, nullptr, nullptr, values());    \
        }                                                                                                             \
        int32_t decode(const void* payloads, int64_t ranks, float* out, const float*, const void*) override {         \
            return CALL(fxcomp_##kind##_decode, payloads, ranks, out, nullptr, nullptr, values());                    \
        }                                                                                                             \
    }
CAST(bf16, 2);
CAST(exact_bf16, 2);
CAST(fp16, 2);
CAST(exact_fp16, 2);
CAST(exact_fp32, 4);

// fxcomp/compressors/block_codes.py
class BlockCodes : public Compressor {
  public:
    BlockCodes(std::string named, int64_t bits, bool has_random)
        : Compressor(std::move(named)), bits_(bits), has_random_(has_random) {}

    void draw(Rng& rng, Sizes& drawn) override {
        const int64_t in_a_byte = 8 / bits_;
        const Sizes blocks{in_a_byte, 2 * in_a_byte, 64, 128, 512, 520, 1024, 4096, 65536};
        block_ = rng.one_in(3) ? in_a_byte * rng.between(1, 700) : rng.of(blocks);
        for (int64_t& size : drawn) {
            if (rng.one_in(4) && size < 4000 && block_ < 20000) size = std::max<int64_t>(0, block_ + rng.between(-1, 1));
        }
        is_random_ = has_random_ && rng.one_in(2);
        set(drawn);
    }

    int64_t payload_bytes() const override {
        int64_t codes = 0;
        for (const int64_t size : segments) codes += ceil_of(size * bits_, 8);
        return 4 * blocks() + ceil_of(codes, 4) * 4;
    }

    int64_t state_bytes() const override { return is_random_ ? 16 * count() : 0; }

    void draw_state(Rng& rng, void* state) override {
        static const std::vector<int64_t> kSteps{0, 1, -1, INT64_MAX, INT64_MIN, 1 << 30};
        auto* const words = static_cast<int64_t*>(state);
        for (int64_t s = 0; s < count(); ++s) {
            words[2 * s] = static_cast<int64_t>(rng.bits() >> 2);
            words[2 * s + 1] = rng.one_in(2) ? rng.below(1000) : rng.of(kSteps);
        }
    }

    Sizes fields() const override {
        Sizes scales;
        for (int64_t block = 0; block < std::min<int64_t>(blocks(), 50); ++block) scales.push_back(4 * block);
        return scales;
    }

  protected:
    int64_t blocks() const {
        int64_t blocks = 0;
        for (const int64_t size : segments) blocks += ceil_of(size, block_);
        return blocks;
    }

    int64_t block_ = 1;

  private:
    int64_t bits_;
    bool has_random_, is_random_ = false;
};

#define BLOCKS(kind, bits, has_random)                                                                                \
    class Blocks_##kind : public BlockCodes {                                                                         \
      public:                                                                                                         \
        Blocks_##kind() : BlockCodes(#kind, bits, has_random) {}                                                      \
        void encode(const Encoded& given) override {                                                                  \
            CALL(fxcomp_##kind##_encode, given.bucket, given.residual, given.payload,                                 \
                 static_cast<int64_t*>(given.state), nullptr, sizes(), count(), block_);                              \
        }                                                                                                             \
        int32_t decode(const void* payloads, int64_t ranks, float* out, const float*, const void*) override {         \
            return CALL(fxcomp_##kind##_decode, payloads, ranks, out, nullptr, nullptr, sizes(), count(), block_);    \
        }                                                                                                             \
    }
BLOCKS(int8, 8, true);
BLOCKS(int4, 4, true);
BLOCKS(int2, 2, true);
BLOCKS(sign, 1, false);

// fxcomp/compressors/cmax.py
class CMax : public Compressor {
  public:
    CMax() : Compressor("cmax") {}

    void draw(Rng& rng, Sizes& drawn) override {
        bits_ = rng.between(1, 7);
        set(drawn);
    }

    int64_t payload_bytes() const override {
        int64_t bytes = 0;
        for (const int64_t size : segments) bytes += section(size);
        return bytes;
    }

    void encode(const Encoded& given) override {
        CALL(fxcomp_cmax_encode, given.bucket, given.residual, given.payload, nullptr, nullptr, sizes(), count(),
             int64_t{1} << bits_);
    }

    int32_t decode(const void* payloads, int64_t ranks, float* out, const float*, const void*) override {
        return CALL(fxcomp_cmax_decode, payloads, ranks, out, nullptr, nullptr, sizes(), count(), int64_t{1} << bits_);
    }

    Sizes fields() const override {
        Sizes scales;
        int64_t at = 0;
        for (const int64_t size : segments) {
            if (size > 0) scales.push_back(at);
            at += section(size);
        }
        return scales;
    }

    bool may_refuse() const override { return true; }

  private:
    int64_t section(int64_t size) const {
        if (size == 0) return 0;
        int64_t bytes = 4;
        for (int64_t width = 8; width > 0; width /= 2) {
            if (((bits_ + 1) & width) != 0) bytes += ceil_of(ceil_of(size, int64_t{1} << bits_) * width, 8);
        }
        return ceil_of(bytes, 4) * 4;
    }

    int64_t bits_ = 1;
};

// fxcomp/compressors/places.py: values with their places
class Sparse : public Compressor {
  public:
    Sparse(std::string named, int64_t header) : Compressor(std::move(named)), header_(header) {}

    void draw(Rng& rng, Sizes& drawn) override {
        static const Sizes kParts{1, 1000, 10000, 100000, 300000, 990000, 1000000};
        part_ = rng.one_in(3) ? rng.between(1, 1000000) : rng.of(kParts);
        set(drawn);
        ks_ = Sizes();
        slots_ = Sizes();
        for (const int64_t n : segments) {
            ks_.push_back(std::max(std::min<int64_t>(n, 1), ceil_of(part_ * n, 1000000)));
            slots_.push_back(header_ == 0 ? ks_.back() : std::min(n, (13 * ks_.back() + 9) / 10));
        }
        given_ks_ = std::make_unique<Exact<int64_t>>(ks_);
        given_slots_ = std::make_unique<Exact<int64_t>>(slots_);
    }

    int64_t payload_bytes() const override {
        int64_t bytes = 0;
        for (size_t s = 0; s < segments.size(); ++s) bytes += section(s);
        return bytes;
    }

    // Counts, and where the bits of places begin.
    Sizes fields() const override {
        Sizes found;
        int64_t at = 0;
        for (size_t s = 0; s < segments.size(); ++s) {
            if (slots_[s] > 0) {
                found.push_back(at);
                found.push_back(at + header_ + 4 * slots_[s]);
                found.push_back(at + section(s) - 4);
            }
            at += section(s);
        }
        return found;
    }

    bool may_refuse() const override { return true; }

  protected:
    double ratio() const { return static_cast<double>(part_) / 1e6; }

    Sizes ks_, slots_;
    std::unique_ptr<Exact<int64_t>> given_ks_, given_slots_;

  private:
    int64_t section(size_t s) const {
        const int64_t n = segments[s], slots = slots_[s];
        if (slots == 0) return 0;
        int64_t places = ceil_of(n, 8);
        for (int64_t form = 8; form <= 16; form += 8) {
            places = std::min(places, slots * form / 8 + ceil_of(slots + ((n - 1) >> form), 8));
        }
        return header_ + 4 * slots + ceil_of(places, 4) * 4;
    }

    int64_t header_, part_ = 1;
};

class TopK : public Sparse {
  public:
    TopK() : Sparse("topk", 0) {}

    void encode(const Encoded& given) override {
        CALL(fxcomp_topk_encode, given.bucket, given.residual, given.payload, nullptr, nullptr, sizes(),
             given_ks_->data(), count());
    }

    int32_t decode(const void* payloads, int64_t ranks, float* out, const float*, const void*) override {
        return CALL(fxcomp_topk_decode, payloads, ranks, out, nullptr, nullptr, sizes(), given_ks_->data(), count());
    }
};

// fxcomp/compressors/sidco.py
class Sidco : public Sparse {
  public:
    Sidco() : Sparse("sidco", 4) {}

    void draw(Rng& rng, Sizes& drawn) override {
        Sparse::draw(rng, drawn);
        fit_ = rng.below(3);
        stages_ = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(std::log(ratio()) / std::log(0.5))));
        Sizes strides, thin;
        for (const int64_t n : segments) {
            const auto reached = static_cast<int64_t>(std::ceil(256 / ratio()));
            const int64_t values = std::min(std::max<int64_t>(reached, 1 << 15), std::max<int64_t>(1 << 17, n / 32));
            const int64_t fewest = std::max(static_cast<int64_t>(std::ceil(64 / ratio())), n / 100);
            strides.push_back(std::max<int64_t>(1, (n / values - 1) | 1));
            thin.push_back(std::max<int64_t>(1, (n / fewest - 1) | 1));
        }
        strides_ = std::make_unique<Exact<int64_t>>(strides);
        thin_ = std::make_unique<Exact<int64_t>>(thin);
    }

    int64_t state_bytes() const override { return 36 * count(); }

    // A fresh controller, and sometimes what a damaged checkpoint may hold.
    void draw_state(Rng& rng, void* state) override {
        const float fresh[9] = {2.0f, 1.0f, 0.0f, 0.0f, 0.0f, 1e30f, 0.0f, 0.0f, 0.0f};
        for (int64_t s = 0; s < count(); ++s) {
            float* const controller = static_cast<float*>(state) + 9 * s;
            std::copy(fresh, fresh + 9, controller);
            controller[2] = static_cast<float>(rng.below(5));
            controller[6] = static_cast<float>(rng.below(2));
            controller[7] = static_cast<float>(rng.one_in(4));
            controller[8] = static_cast<float>(rng.below(1 << 20));
            for (int64_t times = rng.one_in(3) ? 3 : 0; times > 0; --times) {
                controller[rng.below(9)] = as_float(extreme(rng));
            }
        }
    }

    void encode(const Encoded& given) override {
        CALL(fxcomp_sidco_encode, given.bucket, given.residual, given.payload, static_cast<float*>(given.state), nullptr,
             sizes(), given_ks_->data(), given_slots_->data(), count(), strides_->data(), thin_->data(), fit_, stages_);
    }

    int32_t decode(const void* payloads, int64_t ranks, float* out, const float*, const void* state) override {
        return CALL(fxcomp_sidco_decode, payloads, ranks, out, nullptr, state, sizes(), given_ks_->data(),
                    given_slots_->data(), count());
    }

  private:
    int64_t fit_ = 0, stages_ = 1;
    std::unique_ptr<Exact<int64_t>> strides_, thin_;
};

// fxcomp/compressors/powersgd.py
class PowerSGD : public Compressor {
  public:
    PowerSGD() : Compressor("powersgd") {}

    void draw(Rng& rng, Sizes& drawn) override {
        static const Sizes kRanks{1, 2, 3, 4, 5, 8, 17, 64};
        rank_ = rng.of(kRanks);
        columns_ = Sizes();
        for (int64_t& size : drawn) {
            const bool is_dense = size == 0 || rng.one_in(4);
            const int64_t width = std::min<int64_t>(size, rng.one_in(3) ? rng.between(1, 70) : rng.between(1, 1100));
            if (!is_dense) size = size / width * width;  // powersgd.py refuses columns that leave some over
            columns_.push_back(is_dense ? 0 : width);
        }
        set(drawn);
        given_columns_ = std::make_unique<Exact<int64_t>>(columns_);
    }

    int64_t payload_bytes() const override { return 4 * state_values(); }
    int64_t unit() const override { return 4; }
    int64_t state_bytes() const override { return 4 * state_values(); }

    int64_t agreed_values() const override {
        int64_t found = 0;
        for (size_t s = 0; s < segments.size(); ++s) found += columns_[s] > 0 ? rank_ * (segments[s] / columns_[s]) : 0;
        return found;
    }

    void draw_state(Rng& rng, void* state) override {
        Exact<float> drawn(state_values());
        draw_values(rng, drawn);
        if (drawn.count() > 0) std::memcpy(state, drawn.data(), static_cast<size_t>(drawn.size()));
    }

    void propose(const float* bucket, const float* residual, const void* state, float* out) override {
        CALL(fxcomp_powersgd_propose, bucket, residual, static_cast<const float*>(state), out, sizes(),
             given_columns_->data(), count(), rank_);
    }

    void encode(const Encoded& given) override {
        CALL(fxcomp_powersgd_encode, given.bucket, given.residual, given.payload,
             static_cast<const float*>(given.state), given.agreed, sizes(), given_columns_->data(), count(), rank_);
    }

    int32_t decode(const void* payloads, int64_t ranks, float* out, const float* agreed, const void* state) override {
        return CALL(fxcomp_powersgd_decode, payloads, ranks, out, agreed, static_cast<const float*>(state), sizes(),
                    given_columns_->data(), count(), rank_);
    }

  private:
    int64_t state_values() const {
        int64_t found = 0;
        for (size_t s = 0; s < segments.size(); ++s) found += columns_[s] > 0 ? rank_ * columns_[s] : segments[s];
        return found;
    }

    int64_t rank_ = 1;
    Sizes columns_;
    std::unique_ptr<Exact<int64_t>> given_columns_;
};

inline std::vector<std::unique_ptr<Compressor>> all_compressors() {
    std::vector<std::unique_ptr<Compressor>> all;
    all.push_back(std::make_unique<Cast_bf16>());
    all.push_back(std::make_unique<Cast_exact_bf16>());
    all.push_back(std::make_unique<Cast_fp16>());
    all.push_back(std::make_unique<Cast_exact_fp16>());
    all.push_back(std::make_unique<Cast_exact_fp32>());
    all.push_back(std::make_unique<Blocks_int8>());
    all.push_back(std::make_unique<Blocks_int4>());
    all.push_back(std::make_unique<Blocks_int2>());
    all.push_back(std::make_unique<Blocks_sign>());
    all.push_back(std::make_unique<CMax>());
    all.push_back(std::make_unique<TopK>());
    all.push_back(std::make_unique<Sidco>());
    all.push_back(std::make_unique<PowerSGD>());
    return all;
}
