// A thread that watches the record pages of device kernels and reports without Python.
//
// Why native: the Python watchdog needs the GIL, and the one hang nobody can explain afterwards is the one where the main
// thread sits in C with the GIL held.  Python acknowledges what it has reported itself; what stays unacknowledged for the
// grace period is reported here, in raw numbers.  This thread never touches Python, allocates nothing once it runs, and writes each
// report with one write(2), no lock held.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace pk {

constexpr std::size_t kSlotBytes = 128;
constexpr std::size_t kMaxSlots = 64;

// One slot of a record page as the device writes it (little endian); `state` is written last.
struct Record {
    std::uint32_t state;
    std::uint32_t reason;
    std::uint32_t kernel_id;
    std::uint32_t site;
    std::uint32_t rank;
    std::uint32_t block;
    std::uint32_t index;
    std::int32_t seen;
    std::int32_t needed;
    std::uint32_t gen;
    std::uint32_t peer;
    std::uint32_t hash_mine;
    std::uint32_t hash_theirs;
    std::uint32_t ntile;
    std::int32_t tile[4];
    std::uint64_t t_begin;
    std::uint64_t t_end;
    std::uint32_t unused[10];
};
static_assert(sizeof(Record) == kSlotBytes, "a record fills its slot");
static_assert(offsetof(Record, t_begin) == 72 && offsetof(Record, t_end) == 80, "the device's layout");

// Watches one page of `slots` records at `address`, which must stay mapped until stop() has returned.
class Watch {
public:
    // interval_ms: time between two looks; grace_ms: how long a record may wait for acknowledge(); fd: where reports go.
    // Throws std::invalid_argument for values that cannot work.
    Watch(std::uintptr_t address, std::size_t slots, unsigned interval_ms, unsigned grace_ms, int fd);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    // The text that reports use for records of this kernel.
    void name(std::uint32_t kernel_id, const std::string& text);
    // Begins watching; nothing if it already does.
    void start();
    // Ends and joins the thread; nothing if there is none.  Safe from any thread.
    void stop();
    bool running() const;
    // Looks at the page now, reports what is due, and returns how many records that were.
    unsigned poll();
    // The caller has reported every record that is on the page now: this object will not.
    void acknowledge();
    // How many records have been reported since construction.
    std::uint64_t reported() const { return reported_.load(std::memory_order_acquire); }

    // Around fork(): the child gets the object with its names, and no thread.  Registered once, for all of them.
    static void before_fork();
    static void after_fork_in_parent();
    static void after_fork_in_child();

private:
    // What a thread may hold or wait on.  A forked child replaces it whole: in its copy, the thread of the parent would
    // hold the locks and wait on the condition for ever.
    struct Sync {
        std::mutex scan;  // guards slots and names
        std::mutex control;  // guards thread and epoch; taken before scan where both are
        std::condition_variable wake;
        unsigned epoch = 0;  // a thread runs while the epoch is the one it was started in
        std::thread thread;
    };

    // What this object knows of one slot: nothing there, there since a time, or told.
    struct Slot {
        enum { kEmpty, kWaiting, kTold } state = kEmpty;
        std::chrono::steady_clock::time_point since;
    };

    void loop(unsigned epoch);
    bool complete(std::size_t slot) const;
    bool report(std::size_t slot);

    const Record* const page_;
    const std::size_t slots_;
    const std::chrono::milliseconds interval_;
    const std::chrono::milliseconds grace_;
    const int fd_;
    std::atomic<std::uint64_t> reported_{0};
    Slot known_[kMaxSlots];
    std::map<std::uint32_t, std::string> names_;
    std::unique_ptr<Sync> sync_;
};

// Stops every Watch that still runs; called when the interpreter exits.
void stop_all();

}  // namespace pk
