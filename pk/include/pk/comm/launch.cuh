#pragma once
/// The two ends of a launch (counter sets in turn, entry words, last block out) and the order of its tasks.

#include "pk/comm/signal.cuh"
#include "pk/ptx/cluster.cuh"

namespace pk {

// -- beginning ------------------------------------------------------------------------------------------------
/// All threads of the block, thread 0 having initialised its pipelines: reads the launch number.  False if the context
/// was aborted earlier, in which case the kernel does nothing.  CLUSTER: blocks that arrive at each other's mbarriers.
template <int CLUSTER = 1>
PK_DEVICE bool launch_begin(const context& ctx, launch_state& launch) {
    stream_wait();
    if (threadIdx.x == 0) {
        launch.gen = ld_relaxed_gpu(&ctx.own()->gen);
        launch.dead = ld_relaxed_sys(&ctx.own()->abort) != 0;
        launch.failed = 0;
        mbarrier_init(launch.entered, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_barrier();  // the mbarriers of both blocks are there
    return launch.dead == 0;
}

/// By a converged warp: until `words[r]` says for every rank r that it has reached this launch; false if given up.
template <class Role>
PK_DEVICE bool wait_ranks(const Role& role, const u64* words, u32 late, u64 limit_ns, int site) {
    const int lane = lane_index();
    const u32 number = role.launch.gen + 1;
    u64 word = launch_word(role.ctx.hash, number);
    patience limit;
    while (true) {
        if (lane < static_cast<int>(role.ctx.world)) word = ld_relaxed_sys(words + lane);
        const u32 theirs = static_cast<u32>(word), hash = static_cast<u32>(word >> 32);
        // A rank is one launch ahead at most; an exit word may be any number of launches old.
        const u32 missing = __ballot_sync(0xffffffffu, theirs - number > 1);
        const u32 differ = __ballot_sync(0xffffffffu, theirs == number && hash != role.ctx.hash);
        if (missing == 0 && differ == 0) break;
        const u32 verdict = differ ? REASON_DISAGREE : limit.exhausted(role.ctx, limit_ns, late);
        const u32 why = __shfl_sync(0xffffffffu, verdict, 0);
        if (why != 0) {
            const int peer = __ffs(differ ? differ : missing) - 1;
            if (lane == peer)
                give_up(role, why, site, peer, static_cast<s32>(theirs), static_cast<s32>(number),
                        static_cast<u32>(peer), hash, limit.t_begin, limit.t_end);
            return false;
        }
        if (limit.failures > 256) __nanosleep(64);
    }
    fence_acquire_sys();
    fence_proxy_async_global();
    __syncwarp();
    return true;
}

/// The launch warp of every block.  Block 0 tells every rank that this one has begun; each block waits until all have,
/// on behalf of its roles (`enter`); block 0 then clears the counter set of the launch before.  `again`: the block
/// has done so in this launch, and waits only.
template <class Role>
PK_DEVICE void launch_open(Role& role, int site, bool again = false) {
    const context& ctx = role.ctx;
    header* own = ctx.own();
    const u32 gen = role.launch.gen;
    const int lane = lane_index();
    if (blockIdx.x == 0 && !again) {
        if (lane == 0) st_relaxed_gpu(&own->used[counter_set(gen)], ctx.counters);
        if (ctx.world > 1 && lane < static_cast<int>(ctx.world))
            st_release_sys(&ctx.of(lane)->entry[ctx.rank], launch_word(ctx.hash, gen + 1));
        __syncwarp();
    }
    const u32 since = role.log.comes(site);
    if (ctx.world > 1) role.dead = !wait_ranks(role, own->entry, REASON_ENTRY, ctx.entry_timeout_ns, site);
    role.log.passed(since);
    if (elect_one()) mbarrier_arrive(role.launch.entered);
    if (blockIdx.x == 0 && !again && !role.dead) {
        // Every rank has left that launch.  Kernel end orders these zeros before the launch that counts on them.
        const u32 last = counter_set(gen - 1);
        const u32 stale = ld_relaxed_gpu(&own->used[last]);
        s32* set = own->counters + last * ctx.capacity;
        for (u32 i = 4 * lane; i < stale; i += 4 * 32) st_zero16(set + i);
    }
    __syncwarp();
}

// -- end --------------------------------------------------------------------------------------------------------
/// Last statement of every warp's branch: all threads of the block have finished what they issued; with a cluster, those
/// of the other block too, which reaches into this one's shared memory.  Launches behind this one come from here on, not
/// earlier: blocks that wait where others still work slow these down.
template <int CLUSTER = 1>
PK_DEVICE void leave() {
    asm volatile("bar.sync 0;" ::: "memory");
    if constexpr (CLUSTER > 1) cluster_barrier();
    stream_next();
}

/// Makes a record of failure `f`.  The last slot is kept for the first failure of the rank, the cause of the others.
PK_DEVICE void write_record(const context& ctx, const launch_state& launch, const failure& f) {
    const u32 slot = f.first ? record_slots - 1 : atomic_add_gpu(&ctx.own()->record_slots, 1);
    if (!f.first && slot >= record_slots - 1) return;
    record& r = reinterpret_cast<record*>(ctx.records)[slot];
    r.reason = f.why;
    r.kernel_id = ctx.kernel_id;
    r.site = f.site;
    r.rank = ctx.rank;
    r.block = blockIdx.x;
    r.index = f.index;
    r.seen = f.seen;
    r.needed = f.needed;
    r.gen = launch.gen;
    r.peer = f.peer;
    r.hash_mine = ctx.hash;
    r.hash_theirs = f.hash_theirs;
    r.tile_entries = f.tile_entries;
    for (int i = 0; i < 4; ++i) r.tile[i] = f.tile[i];
    r.t_begin = f.t_begin;
    r.t_end = f.t_end;
    fence_release_sys();
    st_relaxed_sys(&r.state, 1);
}

/// One thread: tells the peers that this rank gave up, if its first failure was in this block; then writes the records.
PK_DEVICE void report_failures(const context& ctx, const launch_state& launch) {
    constexpr u32 room = sizeof(launch.failures) / sizeof(failure);
    const u32 count = launch.failed < room ? launch.failed : room;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
        const failure& f = launch.failures[i];
        for (u32 r = 0; f.first && r < ctx.world; ++r)
            if (r != ctx.rank) st_relaxed_sys(&ctx.of(r)->abort, 1 + ctx.rank);
        write_record(ctx, launch, f);
    }
}

/// The launch warp, after `leave`: counts the block out.  The last block exchanges exit words, if the kernel has them,
/// and advances the launch number.  True in the last block of an aborted launch.
template <class Role>
PK_DEVICE bool launch_close(Role& role, int site) {
    const context& ctx = role.ctx;
    header* own = ctx.own();
    const int lane = lane_index();
    u32 last = 0;
    if (lane == 0) last = atomic_add_acq_rel_gpu(&own->done, 1) == gridDim.x - 1;
    last = __shfl_sync(0xffffffffu, last, 0);
    bool aborted = false;
    if (last) {
        const u32 number = role.launch.gen + 1;
        if (lane == 0) st_relaxed_gpu(&own->done, 0);
        aborted = __any_sync(0xffffffffu, ld_relaxed_sys(&own->abort) != 0);
        if (!aborted && (ctx.meeting & EXIT_WORDS) != 0 && ctx.world > 1) {
            if (lane < static_cast<int>(ctx.world))
                st_release_sys(&ctx.of(lane)->exit[ctx.rank], launch_word(ctx.hash, number));
            __syncwarp();
            const u32 since = role.log.comes(site);
            aborted = !wait_ranks(role, own->exit, REASON_EXIT, ctx.timeout_ns, site);
            role.log.passed(since);
        }
        if (!aborted && lane == 0) st_relaxed_gpu(&own->gen, number);
    }
    __syncwarp();
    if (lane == 0) report_failures(ctx, role.launch);
    return aborted;
}

// -- launches that meet no other ------------------------------------------------------------------------------------
/// As `launch_begin`, of a kernel without counters that reaches no other rank: nobody waits to hear that it began, and it
/// begins without asking.  It cannot wait for anything that may fail to come, so it ends, in whatever context.
template <int CLUSTER = 1>
PK_DEVICE bool local_begin(launch_state& launch) {
    stream_wait();
    if (threadIdx.x == 0) {
        launch.dead = 0;
        launch.failed = 0;
        fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_barrier();
    return true;
}

/// As `launch_close`: the launch is not counted.  True if a role gave up all the same.
template <class Role>
PK_DEVICE bool local_close(const Role& role) {
    if (role.launch.dead == 0) return false;
    if (lane_index() == 0) {
        role.launch.gen = ld_relaxed_gpu(&role.ctx.own()->gen);
        report_failures(role.ctx, role.launch);
    }
    __syncwarp();
    return true;
}

/// NaN in the bit pattern of a type.
template <class T> inline constexpr u32 nan_bits = 0x7fffffffu;
template <> inline constexpr u32 nan_bits<bf16> = 0x7fffu;
template <> inline constexpr u32 nan_bits<f16> = 0x7fffu;
template <> inline constexpr u32 nan_bits<e4m3> = 0x7fu;
template <> inline constexpr u32 nan_bits<e5m2> = 0x7fu;

/// One warp: fills a tensor of an aborted launch with NaN.  `numbers`: its extents, then its strides (elements).
template <class T, class... Number>
PK_DEVICE void fill_nan(T* tensor, Number... numbers) {
    constexpr int dims = sizeof...(Number) / 2;
    static_assert(sizeof...(Number) == 2 * dims && 1 <= dims && dims <= 4, "extents, then strides");
    const int value[] = {numbers...};
    u32 rows = 1;
    for (int d = 0; d + 1 < dims; ++d) rows *= value[d];
#pragma unroll 1
    for (u32 row = 0; row < rows; ++row) {
        u32 rest = row;
        u64 at = 0;
#pragma unroll
        for (int d = dims - 2; d >= 0; --d) {
            at += static_cast<u64>(rest % value[d]) * value[dims + d];
            rest /= value[d];
        }
#pragma unroll 1
        for (int col = lane_index(); col < value[dims - 1]; col += 32) {
            const u32 bits = nan_bits<T>;
            tensor[at + static_cast<u64>(col) * value[2 * dims - 1]] = reinterpret_cast<const T&>(bits);
        }
    }
}

// -- tasks ------------------------------------------------------------------------------------------------------
/// The coordinates of a task.
template <int DIMS>
struct coordinates {
    int at[DIMS];
    constexpr PK_DEVICE int operator[](int i) const { return at[i]; }
};

/// Coordinates of task `index` of extents `extent...`: earlier extents outermost; the last two in groups of `group` rows
/// (at least 1), column by column inside a group.  The same function as `pk/ir/order.py`.
template <class... Extent>
constexpr PK_DEVICE coordinates<sizeof...(Extent)> coordinate_in_groups(int group, int index, Extent... extent) {
    constexpr int dims = sizeof...(Extent);
    const int extents[] = {extent...};
    coordinates<dims> result{};
    if constexpr (dims == 1) {
        result.at[0] = index;
    } else {
        const int rows = extents[dims - 2], cols = extents[dims - 1];
        int outer = dims > 2 ? index / (rows * cols) : 0;  // of two extents there is one rectangle
        const int inner = index - outer * (rows * cols);
        const int first = inner / (group * cols) * group;
        const int height = rows - first < group ? rows - first : group;
        const int within = inner - first * cols;
        result.at[dims - 2] = first + within % height;
        result.at[dims - 1] = within / height;
#pragma unroll
        for (int d = dims - 3; d >= 0; --d) {
            result.at[d] = outer % extents[d];
            outer /= extents[d];
        }
    }
    return result;
}

/// The same, with a group known at compile time.
template <int GROUP, class... Extent>
constexpr PK_DEVICE coordinates<sizeof...(Extent)> coordinate(int index, Extent... extent) {
    return coordinate_in_groups(GROUP, index, extent...);
}

}  // namespace pk
