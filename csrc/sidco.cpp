// The values above a fitted threshold: fxcomp/compressors/sidco.py has the formulas, survivors.h the full pass.
//
// 1. naive: fit over all values, a pass for each stage and one to select: 40 bytes a value.
// 2. (here) fit over runs of 16 values, a cache line each, of which few are needed; then one pass over everything.
//
// Scalars are computed with the same operations in the same order as in the reference, in fp64; exp, log and sqrt are
// the C library's in both. Sums run in 512 strided lanes, which then fold in halves.
#include <cmath>

#include "random.h"
#include "survivors.h"

namespace {

using namespace survivors;

constexpr int64_t kSampleRun = 16;
constexpr int64_t kLanes = 512;
constexpr int64_t kGroup = 512;
constexpr double kFirstShare = 0.25;
constexpr float kWindow = 5.0f;
constexpr double kCalls = 1 << 20;
constexpr double kFar = 1e30;
constexpr double kLogTwo = 0.6931471805599453;
constexpr double kHalfLogTwoPi = 0.9189385332046727;

enum Fit : int64_t { kExponential = 0, kGamma = 1, kPareto = 2 };

// The state of one segment, as it lies in memory.
struct Controller {
    float stages, direction, calls_in_window, fitted, reached, deviation, bad_windows, resamples, calls;
};

struct Moments {
    int64_t count;
    double mean, variance;
};

struct Magnitudes {
    const float* values;  // magnitudes, 0 for what is not finite
    int64_t size;
    int64_t padded;  // the next power of two
    double* products;
};

}  // namespace

FXCOMP_INLINE float finite_magnitude(float value) {
    const uint32_t bits = magnitude_bits(value);
    return float_of(bits < kInfinityBits ? bits : 0u);
}

FXCOMP_BODY void take_all(const float* bucket, const float* residual, int64_t size, float* out) {
    if (residual == nullptr) {
        for (int64_t i = 0; i < size; ++i) out[i] = finite_magnitude(bucket[i]);
    } else {
        for (int64_t i = 0; i < size; ++i) out[i] = finite_magnitude(bucket[i] + residual[i]);
    }
}

FXCOMP_BODY void take_runs(const float* bucket, const float* residual, int64_t first, int64_t stride, float* out,
                           int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
        const int64_t start = kSampleRun * (first + run * stride);
        float* const to = out + kSampleRun * run;
        if (residual == nullptr) {
            for (int64_t i = 0; i < kSampleRun; ++i) to[i] = finite_magnitude(bucket[start + i]);
        } else {
            for (int64_t i = 0; i < kSampleRun; ++i) to[i] = finite_magnitude(bucket[start + i] + residual[start + i]);
        }
    }
}

FXCOMP_BODY int64_t count_reaching(const float* magnitudes, int64_t size, uint32_t bits) {
    int64_t count = 0;
    for (int64_t start = 0; start < size; start += kTile) {
        int32_t in_tile = 0;
        for (int64_t i = start; i < std::min(start + kTile, size); ++i) in_tile += bits_of(magnitudes[i]) >= bits;
        count += in_tile;
    }
    return count;
}

struct Sums {
    int64_t count;
    double sum, squares;
};

// Of what exceeds the level.
FXCOMP_BODY Sums sum_above(const float* magnitudes, int64_t size, double level) {
    // Lanes behind the values stay zero, and adding zeros changes nothing.
    int64_t lanes = kLanes;
    while (lanes / 2 >= size && lanes > 1) lanes /= 2;
    double sums[kLanes], squares[kLanes];
    std::fill_n(sums, lanes, 0.0);
    std::fill_n(squares, lanes, 0.0);
    int64_t count = 0;
    for (int64_t start = 0; start < size; start += kLanes) {
        const float* const row = magnitudes + start;
        const int64_t length = std::min(kLanes, size - start);
        int32_t in_row = 0;
        for (int64_t i = 0; i < length; ++i) {
            const double magnitude = static_cast<double>(row[i]);
            const double above = magnitude > level ? magnitude - level : 0.0;
            in_row += magnitude > level;
            sums[i] += above;
            squares[i] += above * above;
        }
        count += in_row;
    }
    for (int64_t half = lanes / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) {
            sums[i] += sums[i + half];
            squares[i] += squares[i + half];
        }
    }
    return {count, sums[0], squares[0]};
}

static Moments moments_above(const Magnitudes& sample, double level) {
    const Sums above = widest<sum_above>(sample.values, sample.size, level);
    if (above.count == 0) return {0, 0.0, 0.0};
    const auto divisor = static_cast<double>(above.count);
    const double mean = above.sum / divisor, square = above.squares / divisor;
    return {above.count, mean, square - mean * mean};
}

// Mantissas multiplied 512 at a time into the first padded / 512 elements; returns the sum of the exponents.
FXCOMP_BODY int64_t multiply_mantissas(const float* magnitudes, int64_t size, int64_t padded, int64_t down_to,
                                       double* products) {
    int64_t exponents = 0;
    for (int64_t i = 0; i < padded; ++i) {
        const double magnitude = i < size && magnitudes[i] > 0.0f ? static_cast<double>(magnitudes[i]) : 1.0;
        uint64_t bits;
        std::memcpy(&bits, &magnitude, sizeof bits);
        exponents += static_cast<int64_t>(bits >> 52) - 1023;
        bits = (bits & ((uint64_t{1} << 52) - 1)) | (uint64_t{1023} << 52);
        std::memcpy(products + i, &bits, sizeof bits);
    }
    for (int64_t length = padded; length > down_to;) {
        length /= 2;
        for (int64_t i = 0; i < length; ++i) products[i] = products[i] * products[i + length];
    }
    return exponents;
}

static double mean_log(const Magnitudes& sample, int64_t count) {
    const int64_t down_to = std::max<int64_t>(1, sample.padded / kGroup);
    const int64_t exponents =
        widest<multiply_mantissas>(sample.values, sample.size, sample.padded, down_to, sample.products);
    double logs = 0.0;
    for (int64_t i = 0; i < down_to; ++i) logs += std::log(sample.products[i]);
    return (static_cast<double>(exponents) * kLogTwo + logs) / static_cast<double>(count);
}

static double log_gamma(double x) {
    double shift = 1.0;
    while (x < 10.0) {
        shift *= x;
        x += 1.0;
    }
    const double inverse = 1.0 / x;
    const double square = inverse * inverse;
    const double series =
        inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0)));
    return (x - 0.5) * std::log(x) - x + kHalfLogTwoPi + series - std::log(shift);
}

static double upper_gamma(double shape, double x, double log_gamma_of_shape) {
    const double front = std::exp(shape * std::log(x) - x - log_gamma_of_shape);
    if (x < shape + 1.0) {
        double term = 1.0 / shape, total = term;
        for (int i = 1; i < 1000; ++i) {
            term *= x / (shape + i);
            total += term;
            if (term < total * 1e-16) break;
        }
        return 1.0 - front * total;
    }
    double b = x + 1.0 - shape, c = 1e300, d = 1.0 / b, total = d;
    for (int i = 1; i < 1000; ++i) {
        const double factor = -i * (i - shape);
        b += 2.0;
        d = 1.0 / (factor * d + b);
        c = b + factor / c;
        const double change = c * d;
        total *= change;
        if (std::abs(change - 1.0) < 1e-15) break;
    }
    return front * total;
}

static double inverse_gamma(double shape, double share) {
    const double log_gamma_of_shape = log_gamma(shape);
    double low = 0.0, high = shape + 10.0;
    while (upper_gamma(shape, high, log_gamma_of_shape) > share) {
        low = high;
        high *= 2.0;
    }
    double x = std::exp((std::log(1.0 - share) + log_gamma_of_shape + std::log(shape)) / shape);
    if (!(low < x && x < high)) x = 0.5 * (low + high);
    for (int i = 0; i < 200; ++i) {
        const double error = upper_gamma(shape, x, log_gamma_of_shape) - share;
        if (error > 0.0) {
            low = x;
        } else {
            high = x;
        }
        const double density = std::exp((shape - 1.0) * std::log(x) - x - log_gamma_of_shape);
        double next = density > 1e-300 ? x + error / density : low;
        if (!(low < next && next < high)) next = 0.5 * (low + high);
        if (std::abs(next - x) <= 1e-10 * x) return next;
        x = next;
    }
    return x;
}

static double quantile(const Moments& moments, double share, int64_t fit) {
    const double mean = moments.mean, variance = moments.variance;
    const double log_share = std::log(share);
    if (fit == kExponential || variance <= 1e-12 * mean * mean) return -mean * log_share;
    const double relative = mean * mean / variance;
    const double shape = 0.5 * (1.0 - relative);
    const double scale = 0.5 * mean * (relative + 1.0);
    if (std::abs(shape) < 1e-6) return -scale * log_share;
    return scale / shape * (std::exp(-shape * log_share) - 1.0);
}

static double gamma_quantile(const Magnitudes& sample, const Moments& moments, double share) {
    const double q = std::log(moments.mean) - mean_log(sample, moments.count);
    if (q < 1e-4) return -moments.mean * std::log(share);
    const double shape = (3.0 - q + std::sqrt((q - 3.0) * (q - 3.0) + 24.0 * q)) / (12.0 * q);
    return moments.mean / shape * inverse_gamma(shape, share);
}

static double fit_threshold(const Magnitudes& sample, double reaching, int64_t stages, int64_t fit) {
    Moments moments = moments_above(sample, 0.0);
    double share = reaching / static_cast<double>(moments.count);
    if (share >= 1.0) return 0.0;
    int64_t left = share < kFirstShare ? stages : 1;
    const double first = left == 1 ? share : kFirstShare;
    double level = fit == kGamma ? gamma_quantile(sample, moments, first) : quantile(moments, first, fit);
    while (left > 1) {
        --left;
        moments = moments_above(sample, level);
        if (moments.count < 2 || static_cast<double>(moments.count) <= reaching) break;
        share = std::exp(std::log(reaching / static_cast<double>(moments.count)) / static_cast<double>(left));
        level += quantile(moments, share, fit);
    }
    return level;
}

static bool is_contradicted(int64_t reached, double reaching, int64_t stride) {
    const double chance = stride > 1 ? std::sqrt(reaching) : 0.0;
    return std::abs(static_cast<double>(reached) - reaching) > std::max(0.05 * reaching, chance);
}

// The sample lies in the scratch until the next one is taken.
static Magnitudes take_magnitudes(const Segment& segment, int64_t stride, int64_t calls, int64_t fit,
                                  Scratch& scratch) {
    const int64_t first = calls % stride, runs = segment.size / kSampleRun;
    const int64_t taken = ceil_divide(runs - first, stride);
    const int64_t size = stride > 1 ? kSampleRun * taken : segment.size;
    int64_t padded = 1;
    while (padded < size) padded *= 2;
    if (static_cast<int64_t>(scratch.sample.size()) < size) scratch.sample.resize(static_cast<size_t>(size));
    if (fit == kGamma && static_cast<int64_t>(scratch.products.size()) < padded) {
        scratch.products.resize(static_cast<size_t>(padded));
    }
    float* const out = scratch.sample.data();
    if (stride > 1) {
        in_parallel(taken, kGrain / 64, [&segment, first, stride, out](int64_t begin, int64_t end) {
            widest<take_runs>(segment.bucket, segment.residual, first, stride, out, begin, end);
        });
    } else {
        widest<take_all>(segment.bucket, segment.residual, size, out);
    }
    return {out, size, padded, scratch.products.data()};
}

static void end_window(Controller& c, double fitted, double reached, double most_stages) {
    const double mean_fitted = fitted / kWindow, mean_reached = reached / kWindow;
    c.calls_in_window = c.fitted = c.reached = c.resamples = 0.0f;
    const bool is_bad = mean_reached < 0.25 || mean_reached > 4.0;
    if (is_bad && c.bad_windows >= 1.0f) {
        c.stages = 2.0f;
        c.direction = 1.0f;
        c.deviation = static_cast<float>(kFar);
        c.bad_windows = 0.0f;
        c.resamples = 1.0f;
        return;
    }
    const double deviation = std::abs(mean_fitted - 1.0);
    c.bad_windows = is_bad ? 1.0f : 0.0f;
    const float direction = deviation > static_cast<double>(c.deviation) ? -c.direction : c.direction;
    c.deviation = static_cast<float>(deviation);
    if (deviation <= 0.2) return;
    const double stages = static_cast<double>(c.stages) + (mean_fitted < 1.0 ? direction : -direction);
    c.stages = static_cast<float>(std::min(std::max(stages, 1.0), most_stages));
    c.direction = direction;
}

static void advance(Controller& c, double fitted, double reached, double most_stages) {
    const double calls = static_cast<double>(c.calls) + 1.0;
    c.calls = static_cast<float>(calls < kCalls ? calls : calls - kCalls);
    c.calls_in_window += 1.0f;
    fitted += static_cast<double>(c.fitted);
    reached += static_cast<double>(c.reached);
    if (c.calls_in_window < kWindow) {
        c.fitted = static_cast<float>(fitted);
        c.reached = static_cast<float>(reached);
    } else {
        end_window(c, fitted, reached, most_stages);
    }
}

// A loaded state may hold any number, also NaN: what is an index or counts a loop is kept within its range.
static int64_t bounded(float value, double least, double most) {
    return static_cast<int64_t>(std::min(std::max(least, static_cast<double>(value)), most));
}

static void encode(const Segment& segment, int64_t stride, int64_t thin_stride, int64_t fit, double most_stages,
                   Controller& controller, Scratch& scratch) {
    const int64_t calls = bounded(controller.calls, 0.0, kCalls - 1.0);
    const int64_t stages = bounded(controller.stages, 1.0, most_stages);
    const Magnitudes sample = take_magnitudes(segment, stride, calls, fit, scratch);
    if (widest<count_reaching>(sample.values, sample.size, 1u) == 0) {
        send(segment, 1u, scratch);
        return;
    }
    const double reaching = static_cast<double>(segment.k) * static_cast<double>(sample.size) /
                            static_cast<double>(segment.size);
    const double threshold = fit_threshold(sample, reaching, stages, fit);
    uint32_t bits = std::clamp(magnitude_bits(static_cast<float>(threshold)), 1u, kInfinityBits - 1);
    const int64_t reached = widest<count_reaching>(sample.values, sample.size, bits);
    if (controller.resamples > 0.0f) {
        const uint32_t random = mix_bits(static_cast<uint32_t>(calls));
        bits = thin_threshold(segment, thin_stride, random, scratch);
    } else if (is_contradicted(reached, reaching, stride)) {
        const auto rank = static_cast<int64_t>(std::floor(reaching + 0.5));
        bits = kth_largest(sample.values, sample.size, std::max<int64_t>(1, rank), scratch.memory);
    }
    const Sent sent = send(segment, bits, scratch);
    if (!sent.is_finite) return;
    advance(controller, static_cast<double>(reached) / reaching,
            static_cast<double>(sent.reached) / static_cast<double>(segment.k), most_stages);
}

FXCOMP_EXPORT void fxcomp_sidco_encode(const float* bucket, float* residual, uint8_t* payload, float* state,
                                       const void*, const int64_t* segments, const int64_t* ks, const int64_t* slots,
                                       int64_t segment_count, const int64_t* strides, const int64_t* thin_strides,
                                       int64_t fit, int64_t most_stages) {
    auto* const controllers = reinterpret_cast<Controller*>(state);
    encode_segments({bucket, residual, payload, 0, 0, 0}, segments, ks, slots, segment_count,
                     [=](int64_t index, const Segment& segment, Scratch& scratch) {
                         encode(segment, strides[index], thin_strides[index], fit, static_cast<double>(most_stages),
                                controllers[index], scratch);
                     });
}
