#pragma once
/// What kernels built for `pk.trace` note besides: when each role came to a place that may wait, and how long it waited
/// there.  Without PK_TRACE all of it is empty.  `pk/runtime/tracing.py` reads the same bytes.

#include "pk/comm/context.cuh"
#include "pk/ptx/misc.cuh"

namespace pk {

inline constexpr int trace_logs = 8;  // of a block: loader 0, storer 1, launch 2, communicator 3, teams of several warps from 4 on

#ifdef PK_TRACE

/// One note.  The first of a log counts them: {notes, notes that found no room}.
struct trace_note {
    u32 begin;   // low word of the SM's clock
    u32 waited;  // cycles spent waiting since
    u32 what;    // a site; or TRACE_TASK + how many coordinates, 16 bits each in `waited` and `value`; or TRACE_STAMP
    s32 value;   // index of the counter or stage
};
inline constexpr u32 TRACE_TASK = 1u << 16;
inline constexpr u32 TRACE_STAMP = 2u << 16;  // the global timer, low and high word in `waited` and `value`

/// The log of one role, written by the thread that reports for it.  A site that is passed again and again, as by a loop
/// over K, is one note.
struct trace_log {
    trace_note* notes = nullptr;  // none in other threads
    u32 room = 0;
    u32 count = 1;  // notes wanted, and the first
    trace_note now = {0, 0, TRACE_STAMP, 0};  // under way, unless a stamp

    PK_DEVICE void open(const context& ctx, bool reports, int place) {
        if (!reports || ctx.trace == 0) return;
        room = ctx.trace_notes - 1;  // the last is for the stamp of `close`
        notes = reinterpret_cast<trace_note*>(ctx.trace) + (blockIdx.x * trace_logs + place) * ctx.trace_notes;
        if (notes->begin != 0) count = notes->begin;  // of a block that has communicated, and computes now
        add(stamp());
    }

    /// The role comes to `site`.  Returns the time, for `passed`.
    PK_DEVICE u32 comes(int site, int value = 0) {
        if (notes == nullptr) return 0;
        const u32 time = clock_low();
        if (now.what != static_cast<u32>(site)) {
            end();
            now = {time, 0, static_cast<u32>(site), value};
        }
        return time;
    }

    /// It has what it waited for since `time`.
    PK_DEVICE void passed(u32 time) {
        if (notes != nullptr) now.waited += clock_low() - time;
    }

    /// It begins a task.
    PK_DEVICE void task(int entries, const int (&at)[4]) {
        if (notes == nullptr) return;
        end();
        const u32 low = (at[0] & 0xffff) | at[1] << 16, high = (at[2] & 0xffff) | at[3] << 16;
        add({clock_low(), low, TRACE_TASK + entries, static_cast<s32>(high)});
    }

    PK_DEVICE void close() {
        if (notes == nullptr) return;
        end();
        const u32 kept = count < room ? count : room;
        notes[kept] = stamp();
        notes[0] = {kept + 1, count - kept, 0, 0};
    }

  private:
    PK_DEVICE static trace_note stamp() {
        const u64 time = global_timer();
        return {clock_low(), static_cast<u32>(time), TRACE_STAMP, static_cast<s32>(time >> 32)};
    }
    PK_DEVICE void end() {
        if (now.what != TRACE_STAMP) add(now);
        now.what = TRACE_STAMP;
    }
    PK_DEVICE void add(const trace_note& note) {
        if (count < room) notes[count] = note;
        ++count;
    }
};

#else

struct trace_log {
    PK_DEVICE void open(const context&, bool, int) {}
    PK_DEVICE u32 comes(int, int = 0) { return 0; }
    PK_DEVICE void passed(u32) {}
    PK_DEVICE void task(int, const int (&)[4]) {}
    PK_DEVICE void close() {}
};

#endif

}  // namespace pk
