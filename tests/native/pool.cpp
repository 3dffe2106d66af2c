// The pool of threads of csrc/threads.cpp under ThreadSanitizer: regions of work of all sizes from one thread and from
// several, inside each other, while the number of threads changes, and in children of a process whose pool runs.
//
//     pool SEED ROUNDS [forks]      prints what was done; ThreadSanitizer stops at the first race
//
// Children are for UndefinedBehaviorSanitizer alone: in the child of a process that has several threads, ThreadSanitizer
// starts none, and AddressSanitizer's allocator may wait for a lock that another thread held.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "abi.h"
#include "drawn.h"
#include "threads.h"

namespace {

const std::vector<int64_t> kUnits{0, 1, 2, 3, 7, 8, 64, 1000};

// Each unit is done once, and plain memory that the units wrote is there for the caller.
void count_units(Rng& rng, bool is_nested) {
    const int64_t units = rng.one_in(2) ? rng.of(kUnits) : rng.below(300), grain = rng.one_in(3) ? 0 : rng.between(1, 20);
    std::vector<int64_t> done(static_cast<size_t>(units));
    const auto add = [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            if (is_nested && unit % 16 == 0) {
                std::vector<int64_t> inside(9);
                in_parallel(9, 1, [&](int64_t from, int64_t to) {
                    for (int64_t k = from; k < to; ++k) ++inside[static_cast<size_t>(k)];
                });
                for (const int64_t times : inside) done[static_cast<size_t>(unit)] += times;
                done[static_cast<size_t>(unit)] -= 9;
            }
            ++done[static_cast<size_t>(unit)];
        }
    };
    if (rng.one_in(2)) {
        in_parallel(units, grain, add);
    } else {
        for_parts(units, [&](int64_t part) { add(part, part + 1); });
    }
    for (const int64_t times : done) check(times == 1, "a unit is left out or repeated", "threads");
}

// In stages, which read what others wrote, as topk does.
void stages(Rng& rng) {
    const int64_t parts = rng.between(1, 9);
    std::vector<int64_t> first(static_cast<size_t>(parts)), second(static_cast<size_t>(parts));
    for_parts(parts, [&](int64_t part) { first[static_cast<size_t>(part)] = part + 1; });
    for_parts(parts, [&](int64_t part) {
        for (const int64_t number : first) second[static_cast<size_t>(part)] += number;
    });
    for (const int64_t sum : second) check(sum == parts * (parts + 1) / 2, "a stage reads too early", "threads");
}

void region(Rng& rng) {
    if (rng.one_in(4)) {
        stages(rng);
    } else {
        count_units(rng, rng.one_in(3));
    }
}

// A kernel that shares its work, on buffers of this thread.
void kernel(Rng& rng) {
    const int64_t n = 3 * 65536 * 4 + rng.below(1000), block = 512;
    Exact<float> bucket(n), out(n);
    for (int64_t i = 0; i < n; ++i) bucket.data()[i] = static_cast<float>(i % 255);
    const Exact<int64_t> segments(std::vector<int64_t>{n});
    const int64_t k = ceil_divide(n, 100), places = ceil_divide(9 * k + n / 256 + 64, 8) + 8;
    Exact<uint8_t> codes(4 * ceil_divide(n, block) + round_up(n, 4)), sparse(4 * k + round_up(places, 4));
    fxcomp_int8_encode(bucket.data(), nullptr, codes.data(), nullptr, nullptr, segments.data(), 1, block);
    const int32_t known = fxcomp_int8_decode(codes.data(), 1, out.data(), nullptr, nullptr, segments.data(), 1, block);
    const Exact<int64_t> ks(std::vector<int64_t>{k});
    fxcomp_topk_encode(bucket.data(), nullptr, sparse.data(), nullptr, nullptr, segments.data(), ks.data(), 1);
    const int32_t sent =
        fxcomp_topk_decode(sparse.data(), 1, out.data(), nullptr, nullptr, segments.data(), ks.data(), 1);
    const int32_t finite = fxcomp_all_finite(out.data(), n);
    check(known == 1 && sent == 1 && finite == 1, "a kernel fails", "threads");
}

void in_child(uint64_t seed) {
    const pid_t child = fork();
    check(child >= 0, "no process could be started", "fork");
    if (child == 0) {
        Rng rng(seed);
        for (int64_t k = 0; k < 20; ++k) region(rng);  // the parent's threads did not come along
        std::fflush(stdout);
        _exit(0);
    }
    int status = 0;
    check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child fails", "fork");
}

}  // namespace

int main(int argc, char** argv) {
    const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
    const int64_t rounds = argc > 2 ? std::atoll(argv[2]) : 100;
    const bool forks = argc > 3;
    std::atomic<int64_t> regions{0}, children{0};
    for (int64_t round = 0; round < rounds; ++round) {
        Rng rng(seed * 1000 + static_cast<uint64_t>(round));
        const int64_t hosts = round % 3 == 0 ? 1 : rng.between(2, 4);
        fxcomp_set_threads(rng.between(1, 6));
        std::vector<std::thread> threads;
        for (int64_t host = 0; host < hosts; ++host) {
            threads.emplace_back([&, mine = Rng(rng.bits())]() mutable {
                for (int64_t k = 0; k < 40; ++k, ++regions) {
                    region(mine);
                    if (mine.one_in(10)) fxcomp_set_threads(mine.between(0, 6));
                }
                if (round % 20 == 1) kernel(mine);
            });
        }
        if (forks && round % 10 == 5) in_child(rng.bits()), ++children;  // while they work
        for (std::thread& thread : threads) thread.join();
        if (forks && round % 10 == 0) in_child(rng.bits()), ++children;
    }
    std::printf("%lld regions, %lld children\n", static_cast<long long>(regions.load()),
                static_cast<long long>(children.load()));
    return 0;
}
