#include "watch.hpp"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <stdexcept>

namespace pk {
namespace {

// Never destroyed: a Watch may outlive static destruction in a process that skips the exit handlers.
std::mutex& registry_lock() {
    static auto* lock = new std::mutex;
    return *lock;
}

std::set<Watch*>& registry() {
    static auto* watches = new std::set<Watch*>;
    return *watches;
}

const char* reason_name(std::uint32_t reason) {
    static const char* const names[] = {"none",     "counter",        "entry",  "exit",
                                        "pipeline", "ranks disagree", "assert", "told by a peer",
                                        "bounds"};
    return reason < sizeof(names) / sizeof(names[0]) ? names[reason] : "unknown";
}

void write_all(int fd, const char* text, std::size_t size) {
    while (size > 0) {
        const ssize_t done = ::write(fd, text, size);
        if (done < 0) {
            if (errno == EINTR) continue;
            return;  // nobody to tell: the place for telling is what failed
        }
        text += done;
        size -= static_cast<std::size_t>(done);
    }
}

// The report of one record as a line; the longest has about 550 characters.  Returns its length.
int format(const Record& record, std::size_t slot, const char* kernel, char* line, std::size_t room) {
    const double ms = record.t_end > record.t_begin ? static_cast<double>(record.t_end - record.t_begin) / 1e6 : 0.0;
    int size = std::snprintf(
        line, room,
        "pk: kernel %.200s (id %u) gave up on rank %u: reason %u (%s), slot %zu, block %u, site %u, index %u, seen %d, "
        "needed %d, peer %u, gen %u, hash %08x/%08x, tile [",
        kernel, record.kernel_id, record.rank, record.reason, reason_name(record.reason), slot, record.block, record.site,
        record.index, record.seen, record.needed, record.peer, record.gen, record.hash_mine, record.hash_theirs);
    const std::uint32_t tiles = std::min<std::uint32_t>(record.ntile, 4);
    for (std::uint32_t i = 0; i < tiles; ++i)
        size += std::snprintf(line + size, room - static_cast<std::size_t>(size), i == 0 ? "%d" : ", %d", record.tile[i]);
    return size + std::snprintf(line + size, room - static_cast<std::size_t>(size), "], waited %.3f ms\n", ms);
}

}  // namespace

Watch::Watch(std::uintptr_t address, std::size_t slots, unsigned interval_ms, unsigned grace_ms, int fd)
    : page_(reinterpret_cast<const Record*>(address)),
      slots_(slots),
      interval_(interval_ms),
      grace_(grace_ms),
      fd_(fd),
      sync_(new Sync) {
    if (address == 0 || address % alignof(std::uint64_t) != 0)
        throw std::invalid_argument("address must be a multiple of 8 and not 0");
    if (slots == 0 || slots > kMaxSlots)
        throw std::invalid_argument("slots must be 1 to " + std::to_string(kMaxSlots) + ", not " + std::to_string(slots));
    if (interval_ms == 0) throw std::invalid_argument("interval_ms must be at least 1");
    static const int once =
        pthread_atfork(&Watch::before_fork, &Watch::after_fork_in_parent, &Watch::after_fork_in_child);
    if (once != 0) throw std::runtime_error("pthread_atfork failed");
    std::lock_guard<std::mutex> guard(registry_lock());
    registry().insert(this);
}

Watch::~Watch() {
    {
        std::lock_guard<std::mutex> guard(registry_lock());
        registry().erase(this);
    }
    stop();
}

void Watch::name(std::uint32_t kernel_id, const std::string& text) {
    std::lock_guard<std::mutex> guard(sync_->scan);
    names_[kernel_id] = text;
}

void Watch::start() {
    std::lock_guard<std::mutex> guard(sync_->control);
    if (sync_->thread.joinable()) return;
    // Signals are for the threads of the interpreter: block them while the new thread inherits its mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        sync_->thread = std::thread(&Watch::loop, this, ++sync_->epoch);
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Watch::stop() {
    std::thread ending;
    {
        std::lock_guard<std::mutex> guard(sync_->control);
        if (!sync_->thread.joinable()) return;
        ++sync_->epoch;
        ending = std::move(sync_->thread);
    }
    sync_->wake.notify_all();
    ending.join();
}

bool Watch::running() const {
    std::lock_guard<std::mutex> guard(sync_->control);
    return sync_->thread.joinable();
}

unsigned Watch::poll() {
    unsigned fresh = 0;
    for (std::size_t slot = 0; slot < slots_; ++slot)
        if (report(slot)) ++fresh;
    return fresh;
}

bool Watch::complete(std::size_t slot) const {
    // The device writes the state last: acquire it, and the other fields are whole.
    return __atomic_load_n(&page_[slot].state, __ATOMIC_ACQUIRE) != 0;
}

bool Watch::report(std::size_t slot) {
    char line[768];
    int size = 0;
    {
        std::lock_guard<std::mutex> guard(sync_->scan);
        Slot& known = known_[slot];
        if (!complete(slot)) {
            known.state = Slot::kEmpty;  // once the host has cleared the slot, the next record in it is news again
            return false;
        }
        const auto now = std::chrono::steady_clock::now();
        if (known.state == Slot::kEmpty) {
            known.state = Slot::kWaiting;
            known.since = now;
        }
        if (known.state == Slot::kTold || now - known.since < grace_) return false;
        known.state = Slot::kTold;
        const Record& record = page_[slot];
        const auto name = names_.find(record.kernel_id);
        size = format(record, slot, name == names_.end() ? "?" : name->second.c_str(), line, sizeof(line));
    }
    write_all(fd_, line, static_cast<std::size_t>(size));
    reported_.fetch_add(1, std::memory_order_release);
    return true;
}

void Watch::acknowledge() {
    std::lock_guard<std::mutex> guard(sync_->scan);
    for (std::size_t slot = 0; slot < slots_; ++slot)
        if (complete(slot)) known_[slot].state = Slot::kTold;
}

void Watch::loop(unsigned epoch) {
    std::unique_lock<std::mutex> guard(sync_->control);
    while (sync_->epoch == epoch) {
        guard.unlock();
        poll();
        guard.lock();
        if (sync_->epoch != epoch) break;
        sync_->wake.wait_for(guard, interval_);
    }
    guard.unlock();
    poll();  // a record that arrived while we were told to stop
}

void Watch::before_fork() {
    registry_lock().lock();
    for (Watch* watch : registry()) {
        watch->sync_->control.lock();
        watch->sync_->scan.lock();
    }
}

void Watch::after_fork_in_parent() {
    for (Watch* watch : registry()) {
        watch->sync_->scan.unlock();
        watch->sync_->control.unlock();
    }
    registry_lock().unlock();
}

void Watch::after_fork_in_child() {
    for (Watch* watch : registry()) {
        watch->sync_.release();  // leaked: to destroy it would wait for the thread, which this process has not
        watch->sync_.reset(new Sync);
    }
    registry_lock().unlock();
}

void stop_all() {
    // The lock keeps every Watch alive while it is joined: a destructor waits for it before anything else.
    std::lock_guard<std::mutex> guard(registry_lock());
    for (Watch* watch : registry()) watch->stop();
}

}  // namespace pk
