// The simulated step of a plan: its tasks in the order of fxcomp/search/plan_tasks.py:assemble, each as soon as its
// stream and its predecessors allow.
#pragma once

#include <algorithm>
#include <vector>

#include "priced_parts.h"

namespace fxcomp {

class PlanClock {
  public:
    explicit PlanClock(const Problem& problem) : p(problem) {}

    // Without shared processors this is the step; with them no step is shorter.
    double alone_us(const std::vector<Bucket>& plan) { return walk<false>(plan); }

    // The step.
    double step_us(const std::vector<Bucket>& plan) {
        if (p.shares == 0) return walk<false>(plan);
        streams_.clear(), us_.clear(), demands_.clear(), beside_.clear(), after_.clear();
        follows_.assign(1, 0);
        walk<true>(plan);
        const auto size = static_cast<int32_t>(us_.size());
        return simulator_.run({size, streams_.data(), us_.data(), demands_.data(), beside_.data(), follows_.data(),
                               after_.data()},
                              p.processors);
    }

  private:
    struct Task {
        int32_t stream;
        double us, demand, beside;
    };

    // Add a task that follows those in `before_`, and return its number.
    template <bool kTasks>
    int32_t add(const Task& task) {
        double start = clocks_[task.stream];
        for (const int32_t other : before_) start = std::max(start, ends_[other]);
        clocks_[task.stream] = start + task.us;
        ends_.push_back(clocks_[task.stream]);
        const auto number = static_cast<int32_t>(ends_.size()) - 1;
        if (task.stream == kCompute) come_to_ = number;
        if (kTasks) {
            streams_.push_back(task.stream);
            us_.push_back(task.us);
            demands_.push_back(task.demand);
            beside_.push_back(task.beside);
            after_.insert(after_.end(), before_.begin(), before_.end());
            follows_.push_back(static_cast<int32_t>(after_.size()));
        }
        return number;
    }

    template <bool kTasks>
    int32_t compute(double us) {
        return add<kTasks>({kCompute, us, p.compute, 1.0});
    }

    template <bool kTasks>
    void broadcast(int32_t after) {
        before_.assign(1, after);
        broadcast_ = add<kTasks>(
            {p.broadcast_stream, p.broadcast_us, std::min(p.broadcast_load, p.processors), p.broadcast_beside});
    }

    // Compute down to a bucket's last gradient.
    template <bool kTasks>
    void enter(double us) {
        before_.clear();
        if (p.broadcast_stream >= 0 && broadcast_ < 0 && done_us_ + us + kRounding >= p.broadcast_ready_us) {
            const double first = std::max(0.0, std::min(p.broadcast_ready_us - done_us_, us));
            broadcast<kTasks>(compute<kTasks>(first));
            done_us_ += first;
            us -= first;
            before_.clear();
        }
        regions_.push_back(compute<kTasks>(us));
        done_us_ += us;
    }

    // Tasks begin to end of a bucket. The pool begins a stage when the main thread has done what comes before it.
    template <bool kTasks>
    void stage(const std::vector<Bucket>& plan, int32_t number, int32_t begin, int32_t end, bool is_started) {
        const Record& record = *plan[number].record;
        const int32_t first = p.template_tasks[record.pattern];
        for (int32_t k = begin; k < end; ++k) {
            const int32_t task = first + k, stream = p.task_stream[task];
            before_.clear();
            for (int32_t f = p.task_follows[task]; f < p.task_follows[task + 1]; ++f) {
                before_.push_back(place(number, p.follows[f]));
            }
            if (is_started && k == begin && stream >= kPool) before_.push_back(come_to_);
            places_[offsets_[number] + k] =
                add<kTasks>({stream, record.us[k], record.demand[k], record.beside[k]});
        }
    }

    int32_t place(int32_t number, int32_t task) const {
        if (task >= 0) return places_[offsets_[number] + task];
        return task == kRegion ? regions_[number] : backward_;
    }

    template <bool kTasks>
    double walk(const std::vector<Bucket>& plan) {
        const auto count = static_cast<int32_t>(plan.size());
        begin(plan);
        double entered_us = 0.0;
        const auto enter_next = [&] {
            const double ready = plan[regions_.size()].record->ready_us;
            enter<kTasks>(ready - entered_us);
            entered_us = ready;
        };
        for (int32_t turn = 0; turn < count + deepest_; ++turn) {
            for (int32_t k = 0; k < deepest_; ++k) {
                const int32_t number = turn - k;
                if (number < 0 || number >= count || k >= depth(plan, number)) continue;
                while (static_cast<int32_t>(regions_.size()) <= std::min(turn, count - 1)) enter_next();
                const int32_t size = p.stage_tasks[p.template_stages[plan[number].record->pattern] + k];
                stage<kTasks>(plan, number, issued_[number], issued_[number] + size, true);
                issued_[number] += size;
            }
        }
        while (static_cast<int32_t>(regions_.size()) < count) enter_next();
        before_.clear();
        backward_ = compute<kTasks>(std::max(0.0, p.backward_us - done_us_));
        if (p.broadcast_stream >= 0 && broadcast_ < 0) broadcast<kTasks>(backward_);
        finish<kTasks>(plan);
        return *std::max_element(clocks_, clocks_ + kStreams);
    }

    // What comes after backward.
    template <bool kTasks>
    void finish(const std::vector<Bucket>& plan) {
        const auto count = static_cast<int32_t>(plan.size());
        for (int32_t number = 0; number < count; ++number) {
            const int32_t pattern = plan[number].record->pattern;
            const int32_t tasks = p.template_tasks[pattern + 1] - p.template_tasks[pattern];
            stage<kTasks>(plan, number, issued_[number], tasks, false);
            if (p.updates_wait == 0) update<kTasks>(plan, number);
        }
        if (p.broadcast_stream >= 0 && p.commits != 0) buffers<kTasks>();
        if (p.updates_wait != 0) {
            before_.clear();
            for (int32_t number = 0; number < count; ++number) arrived(plan, number);
            compute<kTasks>(p.finish_us);
            for (int32_t number = 0; number < count; ++number) update<kTasks>(plan, number);
        }
        if (p.broadcast_stream >= 0 && p.commits == 0) buffers<kTasks>();
    }

    void arrived(const std::vector<Bucket>& plan, int32_t number) {
        const int32_t arrival = p.template_arrival[plan[number].record->pattern];
        if (arrival != kNothing) before_.push_back(place(number, arrival));
    }

    template <bool kTasks>
    void update(const std::vector<Bucket>& plan, int32_t number) {
        before_.clear();
        arrived(plan, number);
        compute<kTasks>(plan[number].record->update_us);
    }

    template <bool kTasks>
    void buffers() {
        before_.assign(1, broadcast_);
        compute<kTasks>(p.buffers_us);
    }

    int32_t depth(const std::vector<Bucket>& plan, int32_t number) const {
        const int32_t pattern = plan[number].record->pattern;
        return p.template_stages[pattern + 1] - p.template_stages[pattern];
    }

    void begin(const std::vector<Bucket>& plan) {
        const auto count = static_cast<int32_t>(plan.size());
        std::fill(clocks_, clocks_ + kStreams, 0.0);
        ends_.clear(), regions_.clear(), offsets_.clear();
        issued_.assign(count, 0);
        deepest_ = 0;
        int32_t tasks = 0;
        for (int32_t number = 0; number < count; ++number) {
            const int32_t pattern = plan[number].record->pattern;
            offsets_.push_back(tasks);
            tasks += p.template_tasks[pattern + 1] - p.template_tasks[pattern];
            deepest_ = std::max(deepest_, depth(plan, number));
        }
        places_.resize(tasks);
        done_us_ = 0.0;
        come_to_ = broadcast_ = backward_ = -1;
    }

    static constexpr int32_t kPool = 5;  // this stream and the one after it
    static constexpr double kRounding = 1e-6;

    const Problem& p;
    Simulator simulator_;
    double clocks_[kStreams];
    double done_us_ = 0.0;
    int32_t come_to_ = -1, broadcast_ = -1, backward_ = -1, deepest_ = 0;
    std::vector<double> ends_;
    std::vector<int32_t> before_, regions_, places_, offsets_, issued_;
    std::vector<int32_t> streams_, follows_, after_;
    std::vector<double> us_, demands_, beside_;
};

}  // namespace fxcomp
