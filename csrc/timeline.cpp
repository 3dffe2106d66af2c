// The simulator's inner loop, as fxcomp/cost/timeline.py specifies it: the same operations in the same order, so that
// both give the same bits.
#include <algorithm>
#include <cassert>
#include <limits>
#include <numeric>
#include <vector>

#include "common.h"

namespace {

constexpr int kStreams = 7;
constexpr int kCompute = 0;
constexpr double kLeast = 1e-9;  // of a processor

// The speed of each of several that ask for so many processors.
void share(const double* demands, const double* limits, double* rates, int size, double count) {
    double sum = 0.0;
    for (int k = 0; k < size; ++k) sum += demands[k] * limits[k];
    std::copy(limits, limits + size, rates);
    if (sum <= count) return;
    double weights[kStreams];
    int order[kStreams];
    double left = count, weight = 0.0;
    for (int k = 0; k < size; ++k) {
        weights[k] = std::max(1.0, demands[k]);
        weight += weights[k];
        order[k] = k;
    }
    std::stable_sort(order, order + size, [&](int a, int b) {
        return demands[a] * limits[a] / weights[a] < demands[b] * limits[b] / weights[b];
    });
    for (int i = 0; i < size; ++i) {
        const int k = order[i];
        if (demands[k] > kLeast) {
            const double got = std::min(demands[k] * limits[k], left * weights[k] / weight);
            rates[k] = got / demands[k];
            left -= got;
        }
        weight -= weights[k];
    }
}

}  // namespace

// Task k runs on stream streams[k] and follows the next counts[k] numbers of `after`. Returns when the last one ends;
// -1 if tasks wait for each other.
FXCOMP_EXPORT double fxcomp_step_time(int32_t size, const int32_t* streams, const double* durations,
                                      const double* demands, const double* beside, const int32_t* counts,
                                      const int32_t* after, double processors) {
    std::vector<int32_t> queues[kStreams];
    std::vector<const int32_t*> follows(size + 1);
    follows[0] = after;
    for (int32_t k = 0; k < size; ++k) {
        queues[streams[k]].push_back(k);
        follows[k + 1] = follows[k] + counts[k];
    }
    std::vector<char> done(size, 0);
    std::vector<double> ends(size, std::numeric_limits<double>::infinity()), rates(size, 1.0);
    size_t heads[kStreams] = {};
    int32_t running[kStreams];
    std::fill(running, running + kStreams, -1);
    double clock = 0.0, last = 0.0;
    int32_t finished = 0;
    while (true) {
        for (bool moved = true; moved;) {
            moved = false;
            for (int place = 0; place < kStreams; ++place) {
                while (running[place] < 0 && heads[place] < queues[place].size()) {
                    const int32_t k = queues[place][heads[place]];
                    if (!std::all_of(follows[k], follows[k + 1], [&](int32_t j) { return done[j] != 0; })) break;
                    ++heads[place];
                    moved = true;
                    if (durations[k] > 0) {
                        running[place] = k;
                    } else {
                        ends[k] = clock;
                        done[k] = 1;
                        ++finished;
                    }
                }
            }
        }
        int32_t now[kStreams];
        double asked[kStreams], limits[kStreams], shares[kStreams];
        int busy = 0;
        const bool computes = running[kCompute] >= 0;
        for (const int32_t k : running) {
            if (k < 0) continue;
            asked[busy] = demands[k];
            limits[busy] = computes ? beside[k] : 1.0;
            now[busy++] = k;
        }
        if (busy == 0) break;
        share(asked, limits, shares, busy, processors);
        double next = std::numeric_limits<double>::infinity();
        for (int i = 0; i < busy; ++i) {
            const int32_t k = now[i];
            if (ends[k] == std::numeric_limits<double>::infinity()) {
                ends[k] = clock + durations[k] / shares[i];
            } else if (shares[i] != rates[k]) {
                ends[k] = clock + (ends[k] - clock) * rates[k] / shares[i];
            }
            rates[k] = shares[i];
            next = std::min(next, ends[k]);
        }
        clock = next;
        for (int32_t& k : running) {
            if (k >= 0 && ends[k] <= clock) {
                done[k] = 1;
                ++finished;
                k = -1;
            }
        }
    }
    for (const double end : ends) last = std::max(last, end);
    return finished == size ? last : -1.0;
}
