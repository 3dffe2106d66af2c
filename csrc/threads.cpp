// A pool of sleeping threads: see threads.h.
#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "common.h"
#include "float_state.h"

namespace {

class Pool {
   public:
    void run(int64_t parts, int64_t threads, void (*body)(void*, int64_t), void* context) {
        const Turn mine(busy_);
        if (!mine.is_taken()) {  // nested, or another kernel has the pool
            for (int64_t part = 0; part < parts; ++part) body(context, part);
            return;
        }
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            start_workers(threads - 1);
            body_ = body;
            context_ = context;
            parts_ = parts;
            float_state_ = float_state();
            places_ = std::min(threads - 1, workers_);
            next_.store(0, std::memory_order_relaxed);
            ++round_;
        }
        for (int64_t helper = 1; helper < threads; ++helper) wake_.notify_one();
        take_parts();
        // Who has not woken up by now is not waited for: there is nothing left to do.
        std::unique_lock<std::mutex> lock(mutex_);
        places_ = 0;
        done_.wait(lock, [this] { return running_ == 0; });
    }

   private:
    // The pool is one kernel's at a time. A flag and no mutex: a kernel that has the pool asks for it again when its
    // parts come here, and a thread must not try to lock a mutex that it holds.
    class Turn {
       public:
        explicit Turn(std::atomic<bool>& busy) : busy_(busy), is_taken_(!busy.exchange(true, std::memory_order_acquire)) {}
        ~Turn() {
            if (is_taken_) busy_.store(false, std::memory_order_release);
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        bool is_taken() const { return is_taken_; }

       private:
        std::atomic<bool>& busy_;
        const bool is_taken_;
    };

    // As many as the system grants: fewer threads give the same bits.
    void start_workers(int64_t count) {
        try {
            for (; workers_ < count; ++workers_) {
                std::thread([this, seen = round_] { work(seen); }).detach();
            }
        } catch (const std::system_error&) {
        }
    }

    void work(uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (places_ == 0) continue;
            --places_;
            ++running_;
            const FloatState state = float_state_;
            lock.unlock();
            set_float_state(state);
            take_parts();
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    void take_parts() {
        for (int64_t part; (part = next_.fetch_add(1, std::memory_order_relaxed)) < parts_;) body_(context_, part);
    }

    std::atomic<bool> busy_{false};
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    void (*body_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    FloatState float_state_{};  // the caller's: other threads compute as it would
    int64_t parts_ = 0, workers_ = 0;
    int64_t places_ = 0, running_ = 0;  // threads that may still join in, and those that have
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
