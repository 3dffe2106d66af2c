// The simulated step of a plan: its tasks in the order of fxcomp/search/plan_tasks.py:assemble, each as soon as its
// stream and its predecessors allow.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "priced_parts.h"

namespace fxcomp {

class PlanClock {
  public:
    explicit PlanClock(const Problem& problem) : p(problem) {
        for (int32_t k = 0; k < problem.strand_options[problem.strands]; ++k) {
            const int32_t pattern = problem.option_template[k];
            deepest_ = std::max(deepest_, problem.template_stages[pattern + 1] - problem.template_stages[pattern]);
            const int32_t tasks = problem.template_tasks[pattern + 1] - problem.template_tasks[pattern];
            room_ = std::max(room_, tasks - kBackward);
        }
    }

    // Simulate a plan, and keep how it goes for plans that begin with the same buckets.
    void keep(const std::vector<Bucket>& plan) {
        begin(plan, 0, kNever);
        kept_.resize(plan.size() * room_);
        turns_.resize(plan.size() + deepest_ + 1);
        shared_ = static_cast<int32_t>(plan.size());
        walk<false, true>(plan);
    }

    // Without shared processors this is the step; with them no step is shorter. Its first `same` buckets are those of
    // the plan that is kept. A step that must be longer than `limit` may come out as any time above that.
    double alone_us(const std::vector<Bucket>& plan, int32_t same, double limit) {
        begin(plan, same, limit);
        return walk<false, false>(plan);
    }

    // The step with shared processors.
    double shared_us(const std::vector<Bucket>& plan) {
        streams_.clear(), us_.clear(), demands_.clear(), beside_.clear(), after_.clear();
        follows_.assign(1, 0);
        begin(plan, 0, kNever);
        numbers_.resize(plan.size() * room_);
        walk<true, false>(plan);
        const auto size = static_cast<int32_t>(us_.size());
        return simulator_.run({size, streams_.data(), us_.data(), demands_.data(), beside_.data(), follows_.data(),
                               after_.data()},
                              p.processors);
    }

  private:
    // What is issued before a turn.
    struct Turn {
        double clocks[kStreams];
        Work issued;  // without regions
        double regions_us, entered_us;
        double broadcast;  // its end
        int32_t regions;
        bool is_shared;  // the broadcast is issued
    };

    // Where the ends of a bucket's tasks lie, behind those of what it may follow besides.
    double* ends(int32_t number) {
        return (number < shared_ ? kept_.data() : own_.data()) + static_cast<ptrdiff_t>(number) * room_ - kBackward;
    }

    int32_t* numbers(int32_t number) { return numbers_.data() + static_cast<ptrdiff_t>(number) * room_ - kBackward; }

    int32_t last_number() const { return static_cast<int32_t>(us_.size()) - 1; }

    // Add a task that starts then at the earliest.
    template <bool kTasks>
    double add(int32_t stream, double start, double us, double demand, double beside) {
        now_.clocks[stream] = std::max(now_.clocks[stream], start) + us;
        if (kTasks) {
            streams_.push_back(stream);
            us_.push_back(us);
            demands_.push_back(demand);
            beside_.push_back(beside);
            follows_.push_back(static_cast<int32_t>(after_.size()));
            if (stream == kCompute) come_to_ = last_number();
        }
        return now_.clocks[stream];
    }

    // Let the next task wait for one.
    template <bool kTasks>
    void follow(int32_t number) {
        if (kTasks) after_.push_back(number);
    }

    template <bool kTasks>
    double compute(double us, double start = 0.0) {
        return add<kTasks>(kCompute, start, us, p.compute, 1.0);
    }

    template <bool kTasks>
    void broadcast(double after) {
        follow<kTasks>(last_number());
        now_.broadcast = add<kTasks>(p.broadcast_stream, after, p.broadcast_us, std::min(p.broadcast_load, p.processors),
                                     p.broadcast_beside);
        now_.is_shared = true;
        if (kTasks) broadcast_ = last_number();
    }

    bool must_share() const { return p.broadcast_stream >= 0 && !now_.is_shared; }

    // Compute down to the next bucket's last gradient.
    template <bool kTasks>
    void enter(const std::vector<Bucket>& plan) {
        const int32_t number = now_.regions++;
        const double ready = plan[number].record->ready_us;
        double us = ready - now_.entered_us;
        now_.entered_us = ready;
        if (must_share() && now_.regions_us + us + kRounding >= p.broadcast_ready_us) {
            const double first = std::max(0.0, std::min(p.broadcast_ready_us - now_.regions_us, us));
            broadcast<kTasks>(compute<kTasks>(first));
            now_.regions_us += first;
            us -= first;
        }
        ends(number)[kRegion] = compute<kTasks>(us);
        if (kTasks) numbers(number)[kRegion] = last_number();
        now_.regions_us += us;
    }

    // Tasks begin to end of a bucket. The pool begins a stage when the main thread has done what comes before it.
    template <bool kTasks>
    void stage(const Record& record, int32_t number, int32_t begin, int32_t end, bool is_started) {
        double* done = ends(number);
        const int32_t first = p.template_tasks[record.pattern];
        for (int32_t k = begin; k < end; ++k) {
            const int32_t stream = p.task_stream[first + k];
            double start = 0.0;
            for (int32_t f = p.task_follows[first + k]; f < p.task_follows[first + k + 1]; ++f) {
                start = std::max(start, done[p.follows[f]]);
                if (kTasks) follow<kTasks>(numbers(number)[p.follows[f]]);
            }
            if (is_started && k == begin && stream >= kPool) {
                start = std::max(start, now_.clocks[kCompute]);
                follow<kTasks>(come_to_);
            }
            done[k] = add<kTasks>(stream, start, record.us[k], record.demand[k], record.beside[k]);
            if (kTasks) numbers(number)[k] = last_number();
        }
    }

    template <bool kTasks, bool kKeeps>
    double walk(const std::vector<Bucket>& plan) {
        const auto count = static_cast<int32_t>(plan.size());
        for (int32_t turn = first_turn_; turn < count + deepest_; ++turn) {
            if (kKeeps) turns_[turn] = now_;
            for (int32_t k = 0; k < deepest_; ++k) {
                const int32_t number = turn - k;
                if (number < 0) break;
                if (number >= count) continue;
                const Record& record = *plan[number].record;
                if (k >= record.stages) continue;
                while (now_.regions <= std::min(turn, count - 1)) enter<kTasks>(plan);
                stage<kTasks>(record, number, k == 0 ? 0 : record.ends[k - 1], record.ends[k], true);
                now_.issued += record.works[k];
            }
            if (!kTasks && !kKeeps) {
                const double us = least_us();
                if (us > limit_) return us;
            }
        }
        while (now_.regions < count) enter<kTasks>(plan);
        const double backward = compute<kTasks>(std::max(0.0, p.backward_us - now_.regions_us));
        const int32_t backward_number = last_number();
        if (must_share()) broadcast<kTasks>(backward);
        for (int32_t number = 0; number < count; ++number) {
            ends(number)[kBackward] = backward;
            if (kTasks) numbers(number)[kBackward] = backward_number;
        }
        finish<kTasks>(plan);
        return *std::max_element(now_.clocks, now_.clocks + kStreams);
    }

    // A bound of the step: every stream still has to do what is not issued.
    double least_us() const {
        return std::max({now_.clocks[kCompute] + (all_.compute_us - now_.issued.compute_us - now_.regions_us),
                         now_.clocks[kInter] + (all_.inter_us - now_.issued.inter_us),
                         now_.clocks[kIntra] + (all_.intra_us - now_.issued.intra_us)});
    }

    // What comes after backward.
    template <bool kTasks>
    void finish(const std::vector<Bucket>& plan) {
        const auto count = static_cast<int32_t>(plan.size());
        for (int32_t number = 0; number < count; ++number) {
            const Record& record = *plan[number].record;
            const int32_t begin = record.stages == 0 ? 0 : record.ends[record.stages - 1];
            stage<kTasks>(record, number, begin, record.tasks, false);
            if (p.updates_wait == 0) compute<kTasks>(record.update_us, arrived<kTasks>(record, number));
        }
        if (p.commits != 0) buffers<kTasks>();
        if (p.updates_wait != 0) {
            double all = 0.0;
            for (int32_t number = 0; number < count; ++number) {
                all = std::max(all, arrived<kTasks>(*plan[number].record, number));
            }
            compute<kTasks>(p.finish_us, all);
            for (int32_t number = 0; number < count; ++number) {
                const Record& record = *plan[number].record;
                compute<kTasks>(record.update_us, arrived<kTasks>(record, number));
            }
        }
        if (p.commits == 0) buffers<kTasks>();
    }

    // When a bucket's update may begin, which is the next task.
    template <bool kTasks>
    double arrived(const Record& record, int32_t number) {
        const int32_t arrival = p.template_arrival[record.pattern];
        if (arrival == kNothing) return 0.0;
        if (kTasks) follow<kTasks>(numbers(number)[arrival]);
        return ends(number)[arrival];
    }

    template <bool kTasks>
    void buffers() {
        if (p.broadcast_stream < 0) return;
        follow<kTasks>(broadcast_);
        compute<kTasks>(p.buffers_us, now_.broadcast);
    }

    void begin(const std::vector<Bucket>& plan, int32_t same, double limit) {
        limit_ = limit * (1 + kRelativeRounding);
        all_ = {p.backward_us + (p.updates_wait != 0 ? p.finish_us : 0.0), 0.0, 0.0};
        if (limit < kNever) {
            for (const Bucket& bucket : plan) all_ += bucket.record->work;
        }
        first_turn_ = same;
        shared_ = 0;
        own_.resize(plan.size() * room_);
        now_ = Turn{};
        if (same == 0) return;
        now_ = turns_[same];
        shared_ = std::min(same, std::max(0, same - deepest_ + 1));  // all of them are issued
        const ptrdiff_t from = static_cast<ptrdiff_t>(shared_) * room_, to = static_cast<ptrdiff_t>(same) * room_;
        std::copy(kept_.begin() + from, kept_.begin() + to, own_.begin() + from);
    }

    static constexpr int32_t kPool = 5;  // this stream and the one after it
    static constexpr double kRounding = 1e-6;
    static constexpr double kRelativeRounding = 1e-12;
    static constexpr double kNever = std::numeric_limits<double>::infinity();

    const Problem& p;
    Simulator simulator_;
    int32_t deepest_ = 0, room_ = 0;  // stages of a bucket, and numbers to keep of it, at most
    int32_t first_turn_ = 0, shared_ = 0;
    double limit_ = kNever;
    Work all_;
    Turn now_;
    std::vector<Turn> turns_;          // of the plan that is kept
    std::vector<double> kept_, own_;   // ends of tasks, of the plan that is kept and of another one
    int32_t come_to_ = -1, broadcast_ = -1;
    std::vector<int32_t> numbers_;
    std::vector<int32_t> streams_, follows_, after_;
    std::vector<double> us_, demands_, beside_;
};

}  // namespace fxcomp
