// The search among plans: change one bucket at a time, the last one first, and then two, until no change helps.
#include "plan_value.h"

namespace fxcomp {
namespace {

constexpr double kWorthARound = 1e-4;   // relative: a round that gains less is the last
constexpr int kCuts = 6;                // even parts that a bucket is split into, and near its ends
constexpr int32_t kBorders[] = {-4, -2, -1, 1, 2, 4};

struct Limits {
    int64_t evaluations;
    int32_t options;  // of a bucket that are tried together with another change
    int32_t apart;    // buckets that are changed together are no further apart
    int32_t dense_only;
    int32_t pairs;
    int32_t borders;  // buckets themselves may change, and not their options alone
    double price;     // us that an element's loss counts for
};

class Descent {
  public:
    explicit Descent(const Problem& problem) : p(problem), values(problem) {}

    void improve(std::vector<Bucket>& plan, const Limits& allowed) {
        limits = allowed;
        limits.evaluations += values.evaluations;
        values.price = limits.price;
        plan_ = plan;
        value_ = values.of(plan_);
        is_base_ = false;
        while (values.evaluations < limits.evaluations) {
            double before = value_.us;
            round();
            if (value_.us < before * (1 - kWorthARound)) continue;
            if (limits.pairs == 0) break;
            before = value_.us;
            pairs();
            if (value_.us >= before * (1 - kWorthARound)) break;
        }
        plan = plan_;
        values.price = 0.0;
    }

    // Find a plan's values with each option for one bucket at a time.
    void others(const std::vector<Bucket>& plan, Value* found) {
        values.keep(base_ = plan);
        for (size_t k = 0; k < base_.size(); ++k) {
            const Part part = base_[k].part;
            for (int32_t option = 0; option < options_of(part.strand); ++option) {
                trial_ = base_;
                trial_[k] = values.bucket(with_option(part, option));
                *found++ = values.of(trial_, {kInfinity, kInfinity}, static_cast<int32_t>(k), true);
            }
        }
    }

    const Problem& p;
    PlanValues values;

  private:
    // Begin to look at the neighbours of the plan.
    void rebase() {
        if (is_base_) return;
        is_base_ = true;
        values.keep(base_ = plan_);
    }

    // Change one bucket at a time, the last one first.
    void round() {
        for (auto k = static_cast<int32_t>(plan_.size()) - 1; k >= 0 && values.evaluations < limits.evaluations; --k) {
            rebase();
            rank_options(k);
            if (limits.borders != 0) split(k), join(k);
            k = std::min(k, static_cast<int32_t>(plan_.size()));
        }
    }

    // Try `trial_`, the first buckets of which are the base's: keep it if it beats what is known.
    Value attempt(int32_t same, bool in_full = false) {
        const Value found = values.of(trial_, value_, same, in_full);
        if (found.beats(value_)) plan_ = trial_, value_ = found, is_base_ = false;
        return found;
    }

    // Begin a trial with the base, without these two buckets.
    void without(int32_t one, int32_t other) {
        trial_.clear();
        for (int32_t k = 0; k < static_cast<int32_t>(base_.size()); ++k) {
            if (k != one && k != other) trial_.push_back(base_[k]);
        }
    }

    // Returns its place.
    int32_t insert(const Part& part) {
        const Bucket bucket = values.bucket(part);
        auto at = trial_.end();
        while (at != trial_.begin() && (at - 1)->record->last > bucket.record->last) --at;
        const auto place = static_cast<int32_t>(at - trial_.begin());
        trial_.insert(at, bucket);
        return place;
    }

    int32_t options_of(int32_t strand) const { return p.strand_options[strand + 1] - p.strand_options[strand]; }

    bool is_offered(int32_t strand, int32_t option) const {
        return limits.dense_only == 0 || (p.option_traits[p.strand_options[strand] + option] & kDense) != 0;
    }

    static Part with_option(Part part, int32_t option) {
        part.option = option;
        return part;
    }

    // Try a bucket's other options, and list the best few, its own first.
    void rank_options(int32_t k) {
        const Part part = base_[k].part;
        ranked_.clear();
        for (int32_t option = 0; option < options_of(part.strand); ++option) {
            if (option == part.option || !is_offered(part.strand, option)) continue;
            trial_ = base_;
            trial_[k] = values.bucket(with_option(part, option));
            const Value found = attempt(k, true);
            ranked_.push_back({found, option});
        }
        std::stable_sort(ranked_.begin(), ranked_.end(), [](const Ranked& a, const Ranked& b) {
            return a.value.us != b.value.us ? a.value.us < b.value.us : a.value.lost < b.value.lost;
        });
        best_options_.assign(1, part.option);
        for (const Ranked& each : ranked_) {
            if (static_cast<int32_t>(best_options_.size()) < limits.options) best_options_.push_back(each.option);
        }
    }

    // The places to split a bucket at: everywhere if it is short, else 1, 2, 4, ... cells from its ends, and evenly.
    static std::vector<int32_t> cuts_of(const Part& part) {
        std::vector<int32_t> cuts;
        const int32_t size = part.stop - part.start;
        if (size <= kCuts + 1) {
            for (int32_t cut = part.start + 1; cut < part.stop; ++cut) cuts.push_back(cut);
            return cuts;
        }
        for (int32_t inside = 1; inside * kCuts < size; inside *= 2) {
            cuts.push_back(part.start + inside);
            cuts.push_back(part.stop - inside);
        }
        for (int32_t number = 1; number < kCuts; ++number) cuts.push_back(part.start + size * number / kCuts);
        return cuts;
    }

    // Split a bucket, and give one side another option.
    void split(int32_t k) {
        const Part part = base_[k].part;
        for (const int32_t cut : cuts_of(part)) {
            for (const int32_t option : best_options_) {
                split_at(k, cut, option, part.option);
                if (option != part.option) split_at(k, cut, part.option, option);
            }
        }
    }

    void split_at(int32_t k, int32_t cut, int32_t first, int32_t second) {
        const Part part = base_[k].part;
        without(k, k);
        const int32_t at = insert({part.strand, part.start, cut, first});
        insert({part.strand, cut, part.stop, second});
        attempt(std::min(k, at));
    }

    // Join a bucket with the next one of its strand, move the border between them, or exchange their options.
    void join(int32_t k) {
        const Part part = base_[k].part;
        const int32_t other = next_of(k);
        if (other < 0) return;
        const Part after = base_[other].part;
        for (const int32_t option : best_options_) joined(k, other, option);
        if (after.option != part.option) {
            if (std::find(best_options_.begin(), best_options_.end(), after.option) == best_options_.end()) {
                joined(k, other, after.option);
            }
            bordered(k, other, part.stop, after.option, part.option);
        }
        for (const int32_t moved : kBorders) bordered(k, other, part.stop + moved, part.option, after.option);
    }

    int32_t next_of(int32_t k) const {
        for (size_t other = k + 1; other < base_.size(); ++other) {
            if (base_[other].part.strand == base_[k].part.strand) return static_cast<int32_t>(other);
        }
        return -1;
    }

    void joined(int32_t k, int32_t other, int32_t option) {
        const Part part = base_[k].part, after = base_[other].part;
        without(k, other);
        insert({part.strand, part.start, after.stop, option});
        attempt(k);
    }

    void bordered(int32_t k, int32_t other, int32_t border, int32_t first, int32_t second) {
        const Part part = base_[k].part, after = base_[other].part;
        if (border <= part.start || border >= after.stop) return;
        without(k, other);
        const int32_t at = insert({part.strand, part.start, border, first});
        insert({part.strand, border, after.stop, second});
        attempt(std::min(k, at));
    }

    // Change two buckets at a time: other options for both, an exchange of theirs, and one option for another everywhere.
    void pairs() {
        rebase();
        const auto count = static_cast<int32_t>(base_.size());
        std::vector<std::vector<int32_t>> options;
        for (int32_t k = 0; k < count; ++k) {
            rank_options(k);
            options.push_back(best_options_);
        }
        for (int32_t k = count - 1; k >= 0 && values.evaluations < limits.evaluations; --k) {
            for (int32_t other = k - 1; other >= std::max(0, k - limits.apart); --other) {
                for (const int32_t one : options[k]) {
                    for (const int32_t two : options[other]) {
                        if (one == base_[k].part.option || two == base_[other].part.option) continue;
                        switched(k, one, other, two);
                    }
                }
            }
            for (int32_t other = 0; other < k; ++other) exchanged(k, other);
            if (limits.borders != 0) split_into(k, options[k]);
        }
        everywhere();
    }

    void switched(int32_t k, int32_t one, int32_t other, int32_t two) {
        trial_ = base_;
        trial_[k] = values.bucket(with_option(base_[k].part, one));
        trial_[other] = values.bucket(with_option(base_[other].part, two));
        attempt(std::min(k, other));
    }

    void exchanged(int32_t k, int32_t other) {
        const Part one = base_[k].part, two = base_[other].part;
        if (one.strand == two.strand && one.option != two.option) switched(k, two.option, other, one.option);
    }

    // Split a bucket, and give both sides other options.
    void split_into(int32_t k, const std::vector<int32_t>& options) {
        const Part part = base_[k].part;
        for (const int32_t cut : cuts_of(part)) {
            for (const int32_t first : options) {
                for (const int32_t second : options) {
                    if (first != part.option && second != part.option) split_at(k, cut, first, second);
                }
            }
        }
    }

    // Give all buckets with one option another one.
    void everywhere() {
        std::vector<Part> seen;
        for (const Bucket& bucket : base_) {
            const auto is_same = [&](const Part& part) {
                return part.strand == bucket.part.strand && part.option == bucket.part.option;
            };
            if (std::any_of(seen.begin(), seen.end(), is_same)) continue;
            seen.push_back(bucket.part);
        }
        for (const Part& part : seen) {
            for (int32_t option = 0; option < options_of(part.strand); ++option) {
                if (option == part.option || !is_offered(part.strand, option)) continue;
                trial_ = base_;
                int32_t same = -1;
                for (size_t k = 0; k < trial_.size(); ++k) {
                    Bucket& bucket = trial_[k];
                    if (bucket.part.strand != part.strand || bucket.part.option != part.option) continue;
                    if (same < 0) same = static_cast<int32_t>(k);
                    bucket = values.bucket(with_option(bucket.part, option));
                }
                attempt(same);
            }
        }
    }

    struct Ranked {
        Value value;
        int32_t option;
    };

    Limits limits{};
    std::vector<Bucket> plan_, base_, trial_;
    Value value_{kInfinity, kInfinity};
    bool is_base_ = false;    // the base is the plan
    std::vector<Ranked> ranked_;
    std::vector<int32_t> best_options_;
};

}  // namespace
}  // namespace fxcomp

using fxcomp::Bucket;
using fxcomp::Descent;
using fxcomp::Limits;
using fxcomp::Part;
using fxcomp::Problem;
using fxcomp::Value;

// A search keeps the buckets that it has priced.
FXCOMP_EXPORT void* fxcomp_search_open(const Problem* problem) { return new Descent(*problem); }

FXCOMP_EXPORT void fxcomp_search_close(void* search) { delete static_cast<Descent*>(search); }

// The steps of plans, which lie one behind another, and what they lose; infinite for a plan that loses too much.
FXCOMP_EXPORT void fxcomp_search_evaluate(void* search, int32_t plans, const int32_t* counts, const Part* parts,
                                          Value* values) {
    auto& descent = *static_cast<Descent*>(search);
    for (int32_t k = 0; k < plans; ++k) {
        values[k] = descent.values.of(descent.values.bound(parts, counts[k]));
        parts += counts[k];
    }
}

// A plan's steps with other options: each time one for all the buckets of each strand.
FXCOMP_EXPORT void fxcomp_search_with_options(void* search, int32_t count, const Part* parts, int32_t times,
                                              const int32_t* options, Value* values) {
    auto& descent = *static_cast<Descent*>(search);
    std::vector<Part> plan(parts, parts + count);
    for (int32_t k = 0; k < times; ++k) {
        for (Part& part : plan) part.option = options[k * descent.p.strands + part.strand];
        values[k] = descent.values.of(descent.values.bound(plan.data(), count));
    }
}

// A plan's values with each option of a strand for one of its buckets at a time, in the order of buckets and options.
FXCOMP_EXPORT void fxcomp_search_others(void* search, int32_t count, const Part* parts, Value* values) {
    auto& descent = *static_cast<Descent*>(search);
    descent.others(descent.values.bound(parts, count), values);
}

// Improve a plan in place, which has room for as many parts as there are cells. Returns the number of its parts.
FXCOMP_EXPORT int32_t fxcomp_search_improve(void* search, int32_t count, Part* parts, const Limits* limits,
                                            int64_t* evaluations) {
    auto& descent = *static_cast<Descent*>(search);
    std::vector<Bucket> plan = descent.values.bound(parts, count);
    descent.improve(plan, *limits);
    *evaluations = descent.values.evaluations;
    for (size_t k = 0; k < plan.size(); ++k) parts[k] = plan[k].part;
    return static_cast<int32_t>(plan.size());
}
