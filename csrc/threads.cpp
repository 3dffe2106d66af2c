// A pool of sleeping threads: see threads.h.
#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "common.h"

namespace {

class Pool {
   public:
    void run(int64_t parts, int64_t threads, void (*body)(void*, int64_t), void* context) {
        std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
        if (!mine.owns_lock()) {  // nested, or another kernel has the pool
            for (int64_t part = 0; part < parts; ++part) body(context, part);
            return;
        }
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            while (static_cast<int64_t>(workers_.size()) < threads - 1) {
                const auto index = static_cast<int64_t>(workers_.size());
                workers_.emplace_back([this, index, seen = round_] { work(index, seen); });
                workers_.back().detach();
            }
            body_ = body;
            context_ = context;
            parts_ = parts;
            helpers_ = threads - 1;
            running_ = threads - 1;
            next_.store(0, std::memory_order_relaxed);
            ++round_;
        }
        wake_.notify_all();
        take_parts();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return running_ == 0; });
    }

   private:
    void work(int64_t index, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (index >= helpers_) continue;
            lock.unlock();
            take_parts();
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    void take_parts() {
        for (int64_t part; (part = next_.fetch_add(1, std::memory_order_relaxed)) < parts_;) body_(context_, part);
    }

    std::mutex busy_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    void (*body_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    int64_t parts_ = 0, helpers_ = 0, running_ = 0;
    std::atomic<int64_t> next_{0};
    uint64_t round_ = 0;
};

std::atomic<int64_t> budget{1};

// Never destroyed: detached threads sleep in it until the process ends. A child process gets a new one, for its
// parent's threads did not come along.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
    Pool* existing = pool.load(std::memory_order_acquire);
    if (existing != nullptr) return *existing;
    Pool* made = new Pool();
    if (!pool.compare_exchange_strong(existing, made, std::memory_order_acq_rel)) {
        delete made;
        return *existing;
    }
#if !defined(_WIN32)
    static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
    static_cast<void>(registered);
#endif
    return *made;
}

}  // namespace

int64_t thread_budget() { return budget.load(std::memory_order_relaxed); }

void run_parts(int64_t parts, void (*body)(void*, int64_t), void* context) {
    const int64_t threads = std::min(parts, thread_budget());
    if (threads > 1) {
        the_pool().run(parts, threads, body, context);
        return;
    }
    for (int64_t part = 0; part < parts; ++part) body(context, part);
}

FXCOMP_EXPORT void fxcomp_set_threads(int64_t threads) { budget.store(std::max<int64_t>(threads, 1)); }
