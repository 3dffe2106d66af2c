// The numbers that a search compares plans by (fxcomp/search/descent/problem.py makes them), and a bucket's tasks with prices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <limits>
#include <unordered_map>
#include <vector>

#include "timeline.h"

namespace fxcomp {

constexpr int32_t kRegion = -1;
constexpr int32_t kBackward = -2;
constexpr int32_t kNothing = -3;
constexpr double kNoTime = 1e-9;  // us: nothing is divided by less
constexpr int32_t kDense = 1;     // traits of an option: dense plans may have it; its values come in bursts
constexpr int32_t kBursty = 2;

// Fields as in fxcomp/search/descent/problem.py. What is of a strand, template or task lies after the one before it,
// from its entry in an array of starts to the next one.
struct Problem {
    const int32_t* strand_cells;    // starts
    const int32_t* last;            // of each cell: its place among all gradients
    const double* ready_us;         // of each cell
    const double* sums;             // of each cell, and behind the last: the features of all before, one behind another
    const double* updates_us;       // of each cell, and behind the last: the updates of all before
    const int32_t* join_last;       // of each cell: the last cell of the gradient that it continues; -1 if none
    const double* join_us;          // of each cell: the time of joining that gradient
    const int32_t* strand_options;  // starts
    const int32_t* option_template;
    const int32_t* strand_losses;   // starts
    const double* losses;           // of each cell, and behind the last: what each option loses of all before
    const int32_t* option_traits;
    const int32_t* option_reach;    // where its entries in `reach` begin; -1 if it carries any bucket
    const int32_t* reach;           // of an option and a cell: where a bucket from there on must end at the latest
    const int32_t* template_tasks;  // starts
    const int32_t* template_stages; // starts
    const int32_t* stage_tasks;     // of each stage: its number of tasks
    const int32_t* template_arrival;
    const int32_t* task_stream;
    const double* task_load;
    const int32_t* task_collective; // the number of its curve; -1 for other work
    const int32_t* task_follows;    // starts
    const int32_t* follows;
    const int32_t* task_terms;      // starts
    const int32_t* term_curve;
    const double* term_factor;
    const double* term_more;
    const int32_t* term_feature;
    const int32_t* curve_points;    // starts
    const double* sizes;
    const double* values;
    const double* slopes;
    double backward_us, finish_us, buffers_us;
    double broadcast_us, broadcast_ready_us, broadcast_load, broadcast_beside;
    double lossable, bursty;
    double processors, compute;
    int32_t strands, features;
    int32_t updates_wait, commits, broadcast_stream;  // -1: nothing is broadcast
    int32_t shares;  // processors may be asked for by more than there are
    int32_t has_spare;
};

// A bucket: cells start to stop of a strand, and one of the strand's options.
struct Part {
    int32_t strand, start, stop, option;
};

constexpr int kInter = 2;
constexpr int kIntra = 1;

// The time that streams are occupied.
struct Work {
    double compute_us = 0.0, inter_us = 0.0, intra_us = 0.0;

    void operator+=(const Work& other) {
        compute_us += other.compute_us;
        inter_us += other.inter_us;
        intra_us += other.intra_us;
    }
};

// A bucket's tasks with prices. Task k of its template takes us[k].
struct Record {
    int32_t pattern;
    int32_t last;
    int32_t tasks, stages;
    const int32_t* ends;  // of its stages: the number of tasks up to there
    double ready_us;
    const double *us, *demand, *beside;
    const Work* works;  // of its stages
    Work work;          // in all, with its update
    double update_us;
    double lost, bursting;
};

struct Bucket {
    Part part;
    const Record* record;
};

// Room for many short arrays, which stay where they are.
template <typename T>
class Room {
  public:
    T* take(size_t size) {
        if (left_ < size) {
            left_ = std::max(size, kBlock);
            blocks_.emplace_back(left_);
            next_ = blocks_.back().data();
        }
        T* taken = next_;
        next_ += size;
        left_ -= size;
        return taken;
    }

  private:
    static constexpr size_t kBlock = 4096;
    std::deque<std::vector<T>> blocks_;
    T* next_ = nullptr;
    size_t left_ = 0;
};

class PricedParts {
  public:
    explicit PricedParts(const Problem& problem) : p(problem) {
        known_.reserve(kKnown);
        for (int32_t pattern = 0; pattern < patterns(); ++pattern) {
            int32_t tasks = 0;
            for (int32_t k = p.template_stages[pattern]; k < p.template_stages[pattern + 1]; ++k) {
                stage_ends_.push_back(tasks += p.stage_tasks[k]);
            }
        }
    }

    const Record* of(const Part& part) {
        // 256 strands, a million cells, 65,536 options.
        const uint64_t key = (static_cast<uint64_t>(part.strand) << 56) | (static_cast<uint64_t>(part.start) << 36) |
                             (static_cast<uint64_t>(part.stop) << 16) | static_cast<uint64_t>(part.option);
        const Record*& known = known_[key];
        if (known == nullptr) known = price(part);
        return known;
    }

    const Problem& p;

  private:
    int32_t patterns() const {
        const int32_t* begin = p.option_template;
        return 1 + *std::max_element(begin, begin + p.strand_options[p.strands]);
    }

    double at(int32_t curve, double size) const {
        const double *begin = p.sizes + p.curve_points[curve], *end = p.sizes + p.curve_points[curve + 1];
        const ptrdiff_t number = std::upper_bound(begin, end, size) - p.sizes - 1;
        return p.values[number] + (size - p.sizes[number]) * p.slopes[number];
    }

    const Record* price(const Part& part) {
        const int32_t option = p.strand_options[part.strand] + part.option, pattern = p.option_template[option];
        const int32_t row = p.strand_cells[part.strand] + part.strand, cell = p.strand_cells[part.strand] + part.start;
        const double* before = p.sums + static_cast<ptrdiff_t>(row + part.start) * p.features;
        const double* after = p.sums + static_cast<ptrdiff_t>(row + part.stop) * p.features;
        const int32_t first = p.template_tasks[pattern], tasks = p.template_tasks[pattern + 1] - first;
        const int32_t first_stage = p.template_stages[pattern], stages = p.template_stages[pattern + 1] - first_stage;
        double *us = numbers_.take(3 * static_cast<size_t>(tasks)), *demand = us + tasks, *beside = demand + tasks;
        records_.emplace_back();
        Record& record = records_.back();
        Work* works = works_.take(static_cast<size_t>(stages) + 1);
        int32_t stage = 0;
        double busy[kStreams] = {};
        for (int32_t k = 0; k < tasks; ++k) {
            const int32_t task = first + k, stream = p.task_stream[task];
            double sum = 0.0, size = 0.0;
            for (int32_t t = p.task_terms[task]; t < p.task_terms[task + 1]; ++t) {
                size = p.term_factor[t] * (after[p.term_feature[t]] - before[p.term_feature[t]]) + p.term_more[t];
                sum += at(p.term_curve[t], size);
            }
            us[k] = sum;
            double load = p.task_load[task];
            beside[k] = 1.0;
            if (p.shares != 0 && p.task_collective[task] >= 0 && sum >= kNoTime) {
                load = at(p.task_collective[task] + 1, size) / sum;
                if (p.has_spare == 0) beside[k] = std::min(1.0, sum / at(p.task_collective[task] + 2, size));
            }
            demand[k] = stream == kCompute ? p.compute : std::min(load, p.processors);
            busy[stream] += sum;
            while (stage < stages && k >= stage_ends_[first_stage + stage]) ++stage;
            works[stage] += {stream == kCompute ? sum : 0.0, stream == kInter ? sum : 0.0, stream == kIntra ? sum : 0.0};
        }
        double update_us = p.updates_us[row + part.stop] - p.updates_us[row + part.start];
        if (p.join_last[cell] >= part.start && p.join_last[cell] < part.stop) update_us += p.join_us[cell];
        const double elements = after[0] - before[0];
        const int32_t width = p.strand_options[part.strand + 1] - p.strand_options[part.strand];
        const double* losses = p.losses + p.strand_losses[part.strand] + part.option;
        const ptrdiff_t start = part.start, stop = part.stop;
        const double lost = losses[stop * width] - losses[start * width];
        const int32_t reach = p.option_reach[option];
        const bool is_carried = reach < 0 || part.stop <= p.reach[reach + part.start];
        const int32_t end = p.strand_cells[part.strand] + part.stop - 1;
        record = {pattern,
                  p.last[end],
                  tasks,
                  stages,
                  stage_ends_.data() + first_stage,
                  p.ready_us[end],
                  us,
                  demand,
                  beside,
                  works,
                  {busy[kCompute] + update_us, busy[kInter], busy[kIntra]},
                  update_us,
                  is_carried ? lost : std::numeric_limits<double>::infinity(),
                  (p.option_traits[option] & kBursty) != 0 ? elements : 0.0};
        return &record;
    }

    static constexpr size_t kKnown = 4096;  // not to begin small

    std::unordered_map<uint64_t, const Record*> known_;
    std::deque<Record> records_;
    Room<double> numbers_;
    Room<Work> works_;  // of stages, and of what no stage has
    std::vector<int32_t> stage_ends_;
};

}  // namespace fxcomp
