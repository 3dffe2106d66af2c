// The simulator and the search with drawn problems of the form that fxcomp/search/descent/problem.py gives them, whose
// numbers lie anywhere in the ranges that its checks allow.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <vector>

#include "abi.h"
#include "drawn.h"

constexpr double kMostUs = 1e18;  // fxcomp/search/workload.py and fxcomp/cost/reading.py allow no more

// A time: usual ones, and the ends of the range.
inline double draw_us(Rng& rng) {
    static const std::vector<double> kEnds{0.0, 5e-324, 1e-300, 1e-9, 1e-10, 1.0, kMostUs};
    return rng.one_in(8) ? rng.of(kEnds) : std::exp(20.0 * rng.uniform() - 5.0);
}

// A share in (0, 1], such as an overlap speed.
inline double draw_share(Rng& rng) { return rng.one_in(3) ? 1.0 : rng.one_in(20) ? 1e-18 : 1.0 - 0.9 * rng.uniform(); }

inline double draw_processors(Rng& rng) {
    static const std::vector<double> kCounts{1e-300, 0.5, 1.0, 1.5, 2.0, 4.0, 1e18};
    return rng.one_in(3) ? std::numeric_limits<double>::infinity() : rng.of(kCounts);
}

inline void simulate_drawn(Rng& rng) {
    const auto size = static_cast<int32_t>(rng.one_in(20) ? 0 : rng.between(1, 40));
    std::vector<int32_t> streams, counts, after;
    std::vector<double> durations, demands, beside;
    const bool waits_for_any = rng.one_in(4);  // tasks may wait for each other
    const bool is_alone = rng.one_in(2);
    for (int32_t k = 0; k < size; ++k) {
        streams.push_back(static_cast<int32_t>(rng.below(fxcomp::kStreams)));
        durations.push_back(draw_us(rng));
        demands.push_back(rng.one_in(3) ? 0.0 : draw_us(rng));
        beside.push_back(is_alone ? 1.0 : draw_share(rng));
        counts.push_back(static_cast<int32_t>(rng.below(4)));
        if (!waits_for_any) counts.back() = std::min(counts.back(), k);
        for (int32_t j = 0; j < counts.back(); ++j) {
            after.push_back(static_cast<int32_t>(rng.below(waits_for_any ? size : k)));
        }
    }
    const Exact<int32_t> s(streams), c(counts), a(after);
    const Exact<double> us(durations), d(demands), b(beside);
    const double end = CALL(fxcomp_step_time, size, s.data(), us.data(), d.data(), b.data(), c.data(), a.data(),
                            draw_processors(rng));
    check(end == -1.0 || end >= 0.0, "returns no time", "step_time");
    check(waits_for_any || end >= 0.0, "tasks wait for each other", "step_time");
}

// A problem, and the arrays that it points to.
class DrawnProblem {
  public:
    explicit DrawnProblem(Rng& rng) : rng_(rng) {
        p.strands = static_cast<int32_t>(rng.between(1, 4));
        p.features = static_cast<int32_t>(rng.between(1, 3));
        p.processors = draw_processors(rng);
        p.compute = rng.one_in(2) ? 1.0 : 0.5 + 4.0 * rng.uniform();
        p.has_spare = static_cast<int32_t>(p.processors >= p.compute + 1);
        p.shares = static_cast<int32_t>(!std::isinf(p.processors) && !rng.one_in(3));
        p.backward_us = draw_us(rng), p.finish_us = draw_us(rng), p.buffers_us = draw_us(rng);
        p.broadcast_stream = rng.one_in(2) ? -1 : static_cast<int32_t>(rng.between(1, 2));
        p.broadcast_us = draw_us(rng), p.broadcast_ready_us = draw_us(rng);
        p.broadcast_load = rng.one_in(2) ? 0.0 : draw_us(rng);
        p.broadcast_beside = p.has_spare != 0 ? 1.0 : draw_share(rng);
        p.lossable = rng.one_in(2) ? std::numeric_limits<double>::max() : draw_us(rng);
        p.bursty = rng.one_in(2) ? std::numeric_limits<double>::infinity() : draw_us(rng);
        p.updates_wait = static_cast<int32_t>(rng.below(2)), p.commits = static_cast<int32_t>(rng.below(2));
        draw_curves();
        draw_templates();
        draw_strands();
    }

    // Buckets of all cells, in the order of their last gradients.
    std::vector<fxcomp::Part> draw_plan() {
        std::vector<fxcomp::Part> plan;
        for (int32_t strand = 0; strand < p.strands; ++strand) {
            for (int32_t start = 0; start < cells[at(strand)];) {
                const auto stop = static_cast<int32_t>(rng_.between(start + 1, cells[at(strand)]));
                plan.push_back({strand, start, stop, static_cast<int32_t>(rng_.below(options[at(strand)]))});
                start = stop;
            }
        }
        std::stable_sort(plan.begin(), plan.end(), [&](const fxcomp::Part& a, const fxcomp::Part& b) {
            return last_of(a) < last_of(b);
        });
        return plan;
    }

    bool is_plan(const fxcomp::Part* parts, int32_t count) const {
        std::vector<int32_t> covered(static_cast<size_t>(p.strand_cells[p.strands]));
        for (int32_t k = 0; k < count; ++k) {
            const fxcomp::Part& part = parts[k];
            if (part.strand < 0 || part.strand >= p.strands || part.start < 0 || part.start >= part.stop) return false;
            if (part.stop > cells[at(part.strand)]) return false;
            if (part.option < 0 || part.option >= options[at(part.strand)]) return false;
            for (int32_t cell = part.start; cell < part.stop; ++cell) ++covered[at(p.strand_cells[part.strand] + cell)];
        }
        return std::all_of(covered.begin(), covered.end(), [](int32_t times) { return times == 1; });
    }

    fxcomp::Problem p{};
    std::vector<int32_t> cells, options;

  private:
    static size_t at(int32_t index) { return static_cast<size_t>(index); }

    int32_t last_of(const fxcomp::Part& part) const { return p.last[p.strand_cells[part.strand] + part.stop - 1]; }

    const int32_t* keep(const std::vector<int32_t>& values) { return ints_.emplace_back(values).data(); }
    const double* keep(const std::vector<double>& values) { return doubles_.emplace_back(values).data(); }

    const int32_t* starts(const std::vector<int32_t>& counts) {
        std::vector<int32_t> sums{0};
        for (const int32_t count : counts) sums.push_back(sums.back() + count);
        return keep(sums);
    }

    // Of each question three: its time, processor time, and time beside compute. Sizes begin at 0.
    void draw_curves() {
        questions_ = static_cast<int32_t>(rng_.between(1, 3));
        std::vector<int32_t> counts;
        std::vector<double> sizes, values, slopes;
        for (int32_t curve = 0; curve < 3 * questions_; ++curve) {
            const auto points = static_cast<int32_t>(rng_.between(2, 5));
            counts.push_back(points);
            double size = 0.0;
            for (int32_t k = 0; k < points; ++k) {
                sizes.push_back(size);
                values.push_back(draw_us(rng_));
                slopes.push_back(rng_.one_in(4) ? 0.0 : draw_us(rng_) / 1e6);
                size = 4.0 * size + 64.0;
            }
        }
        p.curve_points = starts(counts), p.sizes = keep(sizes), p.values = keep(values), p.slopes = keep(slopes);
    }

    void draw_templates() {
        templates_ = static_cast<int32_t>(rng_.between(1, 4));
        std::vector<int32_t> tasks, stages, stage_tasks, arrivals, streams, collectives, follow_counts, follows, terms;
        std::vector<int32_t> curves, features;
        std::vector<double> loads, factors, more;
        for (int32_t pattern = 0; pattern < templates_; ++pattern) {
            const auto count = static_cast<int32_t>(rng_.below(6)), staged = static_cast<int32_t>(rng_.below(count + 1));
            tasks.push_back(count);
            int32_t left = staged, number = 0;
            while (left > 0) {
                stage_tasks.push_back(static_cast<int32_t>(rng_.between(1, left)));
                left -= stage_tasks.back();
                ++number;
            }
            stages.push_back(number);
            // The region, the end of backward, nothing, or a task.
            arrivals.push_back(static_cast<int32_t>(rng_.between(fxcomp::kNothing, count - 1)));
            for (int32_t k = 0; k < count; ++k) {
                streams.push_back(static_cast<int32_t>(rng_.below(fxcomp::kStreams)));
                loads.push_back(rng_.one_in(2) ? 0.0 : rng_.uniform() * 3.0);
                follow_counts.push_back(static_cast<int32_t>(rng_.below(3)));
                for (int32_t f = 0; f < follow_counts.back(); ++f) {
                    const int32_t least = k < staged ? fxcomp::kRegion : fxcomp::kBackward;
                    follows.push_back(static_cast<int32_t>(rng_.between(least, k - 1)));
                }
                terms.push_back(static_cast<int32_t>(rng_.between(1, 2)));
                for (int32_t t = 0; t < terms.back(); ++t) {
                    curves.push_back(3 * static_cast<int32_t>(rng_.below(questions_)));
                    factors.push_back(rng_.one_in(3) ? 1.0 : 8.0 * rng_.uniform());
                    more.push_back(rng_.one_in(2) ? 0.0 : rng_.uniform() * 100.0);
                    features.push_back(static_cast<int32_t>(rng_.below(p.features)));
                }
                collectives.push_back(rng_.one_in(2) ? curves[curves.size() - at(terms.back())] : -1);
            }
        }
        p.template_tasks = starts(tasks), p.template_stages = starts(stages), p.stage_tasks = keep(stage_tasks);
        p.template_arrival = keep(arrivals), p.task_stream = keep(streams), p.task_load = keep(loads);
        p.task_collective = keep(collectives), p.task_follows = starts(follow_counts), p.follows = keep(follows);
        p.task_terms = starts(terms), p.term_curve = keep(curves), p.term_factor = keep(factors);
        p.term_more = keep(more), p.term_feature = keep(features);
    }

    void draw_strands() {
        std::vector<int32_t> last, join_last, patterns, traits, option_reach, reach, loss_counts;
        std::vector<double> ready, sums, updates, join_us, losses;
        for (int32_t strand = 0; strand < p.strands; ++strand) {
            const auto count = static_cast<int32_t>(rng_.between(1, 12)), width = static_cast<int32_t>(rng_.between(1, 4));
            cells.push_back(count), options.push_back(width);
            double time = 0.0, update = 0.0;
            std::vector<double> size(at(p.features)), lost(at(width));
            updates.push_back(0.0);
            sums.insert(sums.end(), size.begin(), size.end());
            losses.insert(losses.end(), lost.begin(), lost.end());
            for (int32_t cell = 0; cell < count; ++cell) {
                last.push_back(cell * p.strands + strand);
                ready.push_back(time = std::min(kMostUs, time + draw_us(rng_)));
                updates.push_back(update += draw_us(rng_));
                for (double& each : size) each += rng_.one_in(5) ? 0.0 : std::floor(std::exp(20.0 * rng_.uniform()));
                for (double& each : lost) each += rng_.one_in(5) ? 0.0 : size[0] * rng_.uniform();
                sums.insert(sums.end(), size.begin(), size.end());
                losses.insert(losses.end(), lost.begin(), lost.end());
                join_last.push_back(rng_.one_in(3) ? static_cast<int32_t>(rng_.between(cell, count - 1)) : -1);
                join_us.push_back(draw_us(rng_));
            }
            loss_counts.push_back((count + 1) * width);
            for (int32_t option = 0; option < width; ++option) {
                patterns.push_back(static_cast<int32_t>(rng_.below(templates_)));
                traits.push_back(static_cast<int32_t>(rng_.below(4)));
                option_reach.push_back(rng_.one_in(3) ? static_cast<int32_t>(reach.size()) : -1);
                for (int32_t cell = 0; cell < count && option_reach.back() >= 0; ++cell) {
                    reach.push_back(static_cast<int32_t>(rng_.between(cell, count)));
                }
            }
        }
        p.strand_cells = starts(cells), p.strand_options = starts(options), p.strand_losses = starts(loss_counts);
        p.last = keep(last), p.ready_us = keep(ready), p.sums = keep(sums), p.updates_us = keep(updates);
        p.join_last = keep(join_last), p.join_us = keep(join_us), p.losses = keep(losses);
        p.option_template = keep(patterns), p.option_traits = keep(traits), p.option_reach = keep(option_reach);
        p.reach = keep(reach);
    }

    Rng& rng_;
    int32_t questions_ = 1, templates_ = 1;
    std::deque<Exact<int32_t>> ints_;
    std::deque<Exact<double>> doubles_;
};

inline void search_drawn(Rng& rng) {
    DrawnProblem drawn(rng);
    void* const search = CALL(fxcomp_search_open, &drawn.p);
    const auto is_value = [](const fxcomp::Value& value) { return value.us >= 0.0 && value.lost >= 0.0; };
    std::vector<int32_t> counts;
    std::vector<fxcomp::Part> parts;
    for (int64_t plans = rng.below(5); plans > 0; --plans) {
        const std::vector<fxcomp::Part> plan = drawn.draw_plan();
        counts.push_back(static_cast<int32_t>(plan.size()));
        parts.insert(parts.end(), plan.begin(), plan.end());
    }
    {
        const Exact<int32_t> each(counts);
        const Exact<fxcomp::Part> all(parts);
        Exact<fxcomp::Value> values(each.count());
        CALL(fxcomp_search_evaluate, search, static_cast<int32_t>(each.count()), each.data(), all.data(), values.data());
        check(std::all_of(values.data(), values.data() + values.count(), is_value), "gives no value", "evaluate");
    }
    const Exact<fxcomp::Part> plan(drawn.draw_plan());
    const auto count = static_cast<int32_t>(plan.count());
    {
        std::vector<int32_t> chosen;
        const auto times = static_cast<int32_t>(rng.below(4));
        for (int32_t k = 0; k < times; ++k) {
            for (const int32_t options : drawn.options) chosen.push_back(static_cast<int32_t>(rng.below(options)));
        }
        const Exact<int32_t> options(chosen);
        Exact<fxcomp::Value> values(times);
        CALL(fxcomp_search_with_options, search, count, plan.data(), times, options.data(), values.data());
        check(std::all_of(values.data(), values.data() + values.count(), is_value), "gives no value", "with_options");
    }
    {
        int64_t all = 0;
        for (int32_t k = 0; k < count; ++k) all += drawn.options[static_cast<size_t>(plan.data()[k].strand)];
        Exact<fxcomp::Value> values(all);
        CALL(fxcomp_search_others, search, count, plan.data(), values.data());
        check(std::all_of(values.data(), values.data() + all, is_value), "gives no value", "others");
    }
    Exact<fxcomp::Part> room(drawn.p.strand_cells[drawn.p.strands] + 1);  // as in fxcomp/search/descent/engine.py
    std::copy(plan.data(), plan.data() + count, room.data());
    SearchLimits limits{rng.between(1, 400), static_cast<int32_t>(rng.between(1, 4)), static_cast<int32_t>(rng.below(4)),
                        static_cast<int32_t>(rng.one_in(4)), static_cast<int32_t>(rng.below(2)),
                        static_cast<int32_t>(rng.below(2)), rng.one_in(2) ? 0.0 : draw_us(rng)};
    int64_t evaluations = -1;
    const int32_t found = CALL(fxcomp_search_improve, search, count, room.data(), &limits, &evaluations);
    check(found >= 0 && found < room.count() && evaluations >= 0, "gives no plan", "improve");
    check(drawn.is_plan(room.data(), found), "loses or repeats a cell", "improve");
    CALL(fxcomp_search_close, search);
}

inline void search_mutated(uint64_t seed, int64_t problems) {
    const auto began = std::chrono::steady_clock::now();
    Rng rng(seed + 77);
    for (int64_t k = 0; k < problems; ++k) {
        simulate_drawn(rng);
        if (k % 4 == 0) search_drawn(rng);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    std::printf("%lld simulations, %lld searches, %.1f s\n", static_cast<long long>(problems),
                static_cast<long long>((problems + 3) / 4), took.count());
}
