// A plan's value: its step, and what it loses. Bounds that cost little come first.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "plan_clock.h"

namespace fxcomp {

constexpr double kSame = 1e-9;  // times that are relatively closer are equal
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Value {
    double us, lost;

    bool beats(const Value& other) const {
        if (us > other.us * (1 + kSame)) return false;
        return us < other.us * (1 - kSame) || lost < other.lost;
    }
};

class PlanValues {
  public:
    explicit PlanValues(const Problem& problem) : p(problem), parts_(problem), clock_(problem) {}

    Bucket bucket(const Part& part) { return {part, parts_.of(part)}; }

    std::vector<Bucket> bound(const Part* parts, int32_t count) {
        std::vector<Bucket> plan;
        for (int32_t k = 0; k < count; ++k) plan.push_back(bucket(parts[k]));
        return plan;
    }

    // Keep a plan for others that begin with the same buckets.
    void keep(const std::vector<Bucket>& plan) {
        clock_.keep(plan);
        sums_.assign(1, nothing());
        for (const Bucket& bucket : plan) {
            sums_.push_back(sums_.back());
            sums_.back() += *bucket.record;
        }
    }

    Value of(const std::vector<Bucket>& plan) { return of(plan, {kInfinity, kInfinity}, 0, true); }

    // A plan's value if it beats `best`; else something that does not, which is its step still if `in_full`. The first
    // `same` buckets are those of the plan that is kept.
    Value of(const std::vector<Bucket>& plan, const Value& best, int32_t same, bool in_full) {
        Sums sums = same > 0 ? sums_[same] : nothing();
        for (size_t k = same; k < plan.size(); ++k) sums += *plan[k].record;
        const double lost = sums.lost;
        if (lost > p.lossable || sums.bursting > p.bursty) return {kInfinity, lost};
        const Work& work = sums.work;
        const double wires = plan.empty() ? 0.0 : plan.front().record->ready_us + std::max(work.inter_us, work.intra_us);
        const double paid = price * lost;
        double us = std::max(work.compute_us, wires) + paid;
        if (us > best.us * (1 + kSame)) return {us, lost};
        ++evaluations;
        const double limit = best.us * (lost < best.lost ? 1 + kSame : 1 - kSame);
        us = clock_.alone_us(plan, same, in_full ? kInfinity : limit - paid) + paid;
        if (p.shares == 0 || us > best.us * (1 + kSame) || (!in_full && us > limit)) return {us, lost};
        return {clock_.shared_us(plan) + paid, lost};
    }

    const Problem& p;
    int64_t evaluations = 0;
    double price = 0.0;  // us that an element's loss counts for: a value's time has it in it

  private:
    // What adds up over buckets.
    struct Sums {
        double lost = 0.0, bursting = 0.0;
        Work work;

        void operator+=(const Record& record) {
            lost += record.lost;
            bursting += record.bursting;
            work += record.work;
        }
    };

    Sums nothing() const {
        Sums sums;
        sums.work.compute_us = p.backward_us + p.finish_us;
        return sums;
    }

    PricedParts parts_;
    PlanClock clock_;
    std::vector<Sums> sums_;  // over so many buckets of the plan that is kept
};

}  // namespace fxcomp
