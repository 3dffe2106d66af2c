// The simulator's event loop, as fxcomp/cost/timeline.py specifies it: the same operations in the same order, so that
// both give the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common.h"

namespace fxcomp {

constexpr int kStreams = 8;
constexpr int kCompute = 0;
constexpr double kLeast = 1e-9;  // of a processor

// The speed of each of several that ask for so many processors.
inline void share(const double* demands, const double* limits, double* rates, int size, double count) {
    double sum = 0.0;
    for (int k = 0; k < size; ++k) sum += demands[k] * limits[k];
    std::copy(limits, limits + size, rates);
    if (sum <= count) return;
    double weights[kStreams], keys[kStreams];
    int order[kStreams];
    double left = count, weight = 0.0;
    for (int k = 0; k < size; ++k) {
        weights[k] = std::max(1.0, demands[k]);
        weight += weights[k];
        keys[k] = demands[k] * limits[k] / weights[k];
        int place = k;  // sorted by insertion: std::stable_sort allocates
        for (; place > 0 && keys[order[place - 1]] > keys[k]; --place) order[place] = order[place - 1];
        order[place] = k;
    }
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

// Tasks on streams. Task k follows those of `after` from `follows[k]` up to `follows[k + 1]`.
struct Tasks {
    int32_t size;
    const int32_t* streams;
    const double* durations;
    const double* demands;
    const double* beside;
    const int32_t* follows;
    const int32_t* after;
};

// Runs tasks, and keeps its buffers from one run to the next.
class Simulator {
  public:
    // Returns when the last task ends; -1 if tasks wait for each other.
    double run(const Tasks& tasks, double processors) {
        double last = 0.0;
        if (std::isinf(processors) && run_in_order(tasks, last)) return last;
        for (auto& queue : queues_) queue.clear();
        for (int32_t k = 0; k < tasks.size; ++k) queues_[tasks.streams[k]].push_back(k);
        done_.assign(tasks.size, 0);
        ends_.assign(tasks.size, kNever);
        rates_.assign(tasks.size, 1.0);
        std::fill(heads_, heads_ + kStreams, size_t{0});
        std::fill(running_, running_ + kStreams, -1);
        finished_ = 0;
        double clock = 0.0;
        while (true) {
            start_what_may(tasks, clock);
            int32_t now[kStreams];
            double asked[kStreams], limits[kStreams], shares[kStreams];
            int busy = 0;
            const bool computes = running_[kCompute] >= 0;
            for (const int32_t k : running_) {
                if (k < 0) continue;
                asked[busy] = tasks.demands[k];
                limits[busy] = computes ? tasks.beside[k] : 1.0;
                now[busy++] = k;
            }
            if (busy == 0) break;
            share(asked, limits, shares, busy, processors);
            double next = kNever;
            for (int i = 0; i < busy; ++i) {
                const int32_t k = now[i];
                if (ends_[k] == kNever) {
                    ends_[k] = clock + tasks.durations[k] / shares[i];
                } else if (shares[i] != rates_[k]) {
                    ends_[k] = clock + (ends_[k] - clock) * rates_[k] / shares[i];
                }
                rates_[k] = shares[i];
                next = std::min(next, ends_[k]);
            }
            if (std::isinf(next)) return kNever;  // or time would stand still, where an end is NaN
            clock = next;
            for (int32_t& k : running_) {
                if (k >= 0 && ends_[k] <= clock) {
                    done_[k] = 1;
                    ++finished_;
                    k = -1;
                }
            }
        }
        for (const double end : ends_) last = std::max(last, end);
        return finished_ == tasks.size ? last : -1.0;
    }

  private:
    static constexpr double kNever = std::numeric_limits<double>::infinity();

    // Where nothing is shared, and every task comes after those that it follows, one look at each is enough.
    bool run_in_order(const Tasks& tasks, double& last) {
        double clocks[kStreams] = {};
        ends_.resize(tasks.size);
        for (int32_t k = 0; k < tasks.size; ++k) {
            if (tasks.beside[k] != 1.0) return false;
            double& clock = clocks[tasks.streams[k]];
            for (int32_t f = tasks.follows[k]; f < tasks.follows[k + 1]; ++f) {
                if (tasks.after[f] >= k) return false;
                clock = std::max(clock, ends_[tasks.after[f]]);
            }
            ends_[k] = clock += tasks.durations[k];
        }
        last = *std::max_element(clocks, clocks + kStreams);
        return true;
    }

    // Start the head of every idle stream whose predecessors are done; what takes no time is done at once.
    void start_what_may(const Tasks& tasks, double clock) {
        for (bool moved = true; moved;) {
            moved = false;
            for (int place = 0; place < kStreams; ++place) {
                while (running_[place] < 0 && heads_[place] < queues_[place].size()) {
                    const int32_t k = queues_[place][heads_[place]];
                    const int32_t *begin = tasks.after + tasks.follows[k], *end = tasks.after + tasks.follows[k + 1];
                    if (!std::all_of(begin, end, [&](int32_t j) { return done_[j] != 0; })) break;
                    ++heads_[place];
                    moved = true;
                    if (tasks.durations[k] > 0) {
                        running_[place] = k;
                    } else {
                        ends_[k] = clock;
                        done_[k] = 1;
                        ++finished_;
                    }
                }
            }
        }
    }

    std::vector<int32_t> queues_[kStreams];
    std::vector<char> done_;
    std::vector<double> ends_, rates_;
    size_t heads_[kStreams];
    int32_t running_[kStreams];
    int32_t finished_;
};

}  // namespace fxcomp
