#pragma once
/// What the lanes of a role do each for its own elements of an index vector: rows gathered and scattered, elements
/// stored, counters signalled and waited for.  Every function is called by all threads of the role, converged; in a
/// role of several warps the first one acts.

#include "pk/comm/signal.cuh"
#include "pk/ptx/bulk.cuh"
#include "pk/tile/shared.cuh"
#include "pk/tile/view.cuh"

namespace pk {

/// Whether the role's first warp may act: uniform in every warp, so that lanes may vote.
template <class Role>
PK_DEVICE bool first_warp_acts(const Role& role) {
    return __all_sync(0xffffffffu, !role.dead) && role.first_warp();
}

/// Address of element (row, col) of rank `owner`'s copy; null if there is none.
template <class View>
PK_DEVICE typename View::element* row_address(const View& x, int world, int owner, int row, int col) {
    if (row < 0 || row >= x.shape.extent[0] || owner < 0 || owner >= world) return nullptr;
    return x.of(owner) + (static_cast<long long>(row) * x.shape.stride[0] + col);
}

/// Elements of a row of `Tile` that lie in a tensor of `cols` columns when the row begins at `col`.
template <class Tile>
PK_DEVICE int row_width(int cols, int col) { return ::min(::max(cols - col, 0), Tile::cols); }

/// Row i of the tile := columns `col`... of row `row[i]` (of rank `owner[i]`); what lies outside the tensor is zero.
template <class Role, class Tile, class View, class Owner>
PK_DEVICE void gather_async(Role& role, Tile& tile, mbarrier& bar, const View& x, const Owner& owner,
                            const index_vector<int, Tile::rows>& row, int col) {
    using T = typename View::element;
    static_assert(Role::threads == 32, "a loader gathers");
    if (!first_warp_acts(role)) return;
    const int world = role.ctx.world, lane = lane_index();
    const int width = row_width<Tile>(x.shape.extent[1], col);
    const int bytes = width * static_cast<int>(sizeof(T)) & ~15;  // the rest of a ragged edge goes element by element
    constexpr int words = index_vector<int, Tile::rows>::words;
    u32 inside[words], rows = 0;
    const T* from[words];
#pragma unroll
    for (int i = 0; i < words; ++i) {
        from[i] = row.holds(i) ? row_address(x, world, element(owner, i), row.data[i], col) : nullptr;
        inside[i] = __ballot_sync(0xffffffffu, from[i] != nullptr);
        rows += __popc(inside[i]);
    }
    if (lane == 0 && rows * bytes != 0) mbarrier_expect(bar, rows * bytes);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < words; ++i)
        if (from[i] != nullptr && bytes != 0) bulk_load(tile.address(0, 32 * i + lane), from[i], bytes, bar);
    if (rows == Tile::rows && bytes == Tile::row_bytes) return;
#pragma unroll
    for (int i = 0; i < words; ++i)  // all lanes fill what no copy writes
#pragma unroll 1
        for (int r = 0; r < 32 && 32 * i + r < Tile::rows; ++r)
            for (int at = (inside[i] >> r & 1 ? bytes : 0) + 16 * lane; at < Tile::row_bytes; at += 16 * 32)
                st_shared_zero16(tile.address(0, 32 * i + r) + at);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < words; ++i)
        for (int c = bytes / static_cast<int>(sizeof(T)); from[i] != nullptr && c < width; ++c)
            st_shared_element(tile.element_address(32 * i + lane, c), ld_weak(from[i] + c));
    fence_proxy_async_shared();
    __syncwarp();
}

/// Columns `col`... of row `row[i]` (of rank `owner[i]`) := row i of the tile; what lies outside the tensor is dropped.
/// Part of each lane's next `store_commit`.
template <class Role, class Tile, class View, class Owner>
PK_DEVICE void scatter_async(Role& role, const View& x, const Owner& owner, const index_vector<int, Tile::rows>& row,
                             int col, const Tile& tile) {
    using T = typename View::element;
    static_assert(Role::threads == 32, "a storer scatters");
    if (!first_warp_acts(role)) return;
    role.lanes_store = true;
    const int width = row_width<Tile>(x.shape.extent[1], col);
    const int bytes = width * static_cast<int>(sizeof(T)) & ~15;
    constexpr int words = index_vector<int, Tile::rows>::words;
#pragma unroll
    for (int i = 0; i < words; ++i) {
        const int r = 32 * i + lane_index();
        T* to = row.holds(i) ? row_address(x, role.ctx.world, element(owner, i), row.data[i], col) : nullptr;
        if (to != nullptr && bytes != 0) bulk_store(to, tile.address(0, r), bytes);
        for (int c = bytes / static_cast<int>(sizeof(T)); to != nullptr && c < width; ++c)
            to[c] = ld_shared_element<T>(tile.element_address(r, c));
    }
    __syncwarp();
}

/// x[coord...] of rank `owner` := value, element by element of whichever are vectors (of R elements); dropped outside.
template <int R, class Role, class View, class Owner, class Value, class... Coord>
PK_DEVICE void store_elements(Role& role, const View& x, const Value& value, const Owner& owner, const Coord&... coord) {
    static_assert(sizeof...(Coord) == View::dims, "one coordinate a dimension");
    if (!first_warp_acts(role)) return;
#pragma unroll
    for (int i = 0; i < index_vector<int, R>::words; ++i) {
        const int at[] = {element(coord, i)...};
        const int rank = element(owner, i);
        const long long offset = element_offset(x.shape, at);
        if (index_vector<int, R>::holds(i) && offset >= 0 && 0 <= rank && rank < static_cast<int>(role.ctx.world))
            x.of(rank)[offset] = element(value, i);
    }
    __syncwarp();
}

/// Flat number of element `word` of a counter in its array; negative if an index is negative (or does not exist).
template <int DIMS, class... Index>
PK_DEVICE int element_index(const signal_array<DIMS>& array, int word, const Index&... index) {
    const int at[] = {element(index, word)..., 0};
    bool exists = true;
#pragma unroll
    for (int i = 0; i < DIMS; ++i) exists = exists && 0 <= at[i] && at[i] < array.shape[i];
    const int flat = array.index(element(index, word)...);
    return exists ? flat : -1;
}

/// Adds `value` to that counter of rank `owner`, element by element; a negative index is skipped.  Each add comes after
/// all earlier stores of this role.
template <int R, class Role, int DIMS, class Owner, class Value, class... Index>
PK_DEVICE void signal_each(Role& role, const signal_array<DIMS>& array, const Owner& owner, const Value& value, int site,
                           const Index&... index) {
    enter(role, site);
    const u32 since = role.log.comes(site);
    if constexpr (Role::threads == 32) store_commit();  // those of a stage that is still held, too
    if (role.lanes_store || role.leader()) store_wait<0>();
    if (!role.all(!role.dead)) role.dead = true;
    role.log.passed(since);
    if (!role.first_warp() || role.dead || role.launch.dead) return;
    fence_release_sys();
#pragma unroll
    for (int i = 0; i < index_vector<int, R>::words; ++i) {
        const int number = element_index(array, i, index...), rank = element(owner, i);
        if (index_vector<int, R>::holds(i) && number >= 0 && 0 <= rank && rank < static_cast<int>(role.ctx.world))
            red_relaxed_sys(counter(role, rank, array.offset + number), element(value, i));
    }
    __syncwarp();
}

/// The first warp's part of `wait_each`.
template <int R, class Role, int DIMS, class Value, class... Index>
PK_DEVICE bool wait_counters(const Role& role, const signal_array<DIMS>& array, const Value& value, int site,
                             const Index&... index) {
    patience limit;
#pragma unroll
    for (int i = 0; i < index_vector<int, R>::words; ++i) {
        const int number = element_index(array, i, index...), needed = element(value, i);
        const bool waits = index_vector<int, R>::holds(i) && number >= 0;
        const s32* word = counter(role, role.ctx.rank, array.offset + ::max(number, 0));
        while (true) {
            const s32 seen = waits ? ld_relaxed_sys(word) : needed;
            const u32 missing = __ballot_sync(0xffffffffu, seen < needed);
            if (missing == 0) break;
            const u32 why = __shfl_sync(0xffffffffu, limit.exhausted(role), 0);
            if (why != 0) {
                if (lane_index() == __ffs(missing) - 1)
                    give_up(role, why, site, number, seen, needed, role.ctx.rank, 0, limit.t_begin, limit.t_end);
                return false;
            }
            if (limit.failures > 256) __nanosleep(64);
        }
    }
    fence_acquire_sys();
    fence_proxy_async_global();
    return true;
}

/// Until each of my counters at `index` is at least `value`; a negative index is skipped.
template <int R, class Role, int DIMS, class Value, class... Index>
PK_DEVICE void wait_each(Role& role, const signal_array<DIMS>& array, const Value& value, int site, const Index&... index) {
    const u32 since = role.log.comes(site);
    bool ok = true;
    if (first_warp_acts(role)) ok = wait_counters<R>(role, array, value, site, index...);
    if (!role.all(ok && !role.dead)) role.dead = true;
    fence_proxy_async_global();
    role.log.passed(since);
}

/// Adds `value` to my counter, after all earlier stores of this role; the value found, in every thread.  Everything
/// after it sees what those who added before had stored.
template <class Role, int DIMS>
PK_DEVICE int fetch_add(Role& role, const signal_array<DIMS>& array, int index, s32 value) {
    s32 found = 0;
    const bool adds = stores_complete(role);
    if (adds) {
        fence_release_sys();
        found = atomic_add_sys(counter(role, role.ctx.rank, array.offset + index), value);
        fence_acquire_sys();
        fence_proxy_async_global();
    }
    if constexpr (Role::threads == 32) {
        const u32 who = __ballot_sync(0xffffffffu, adds);
        found = __shfl_sync(0xffffffffu, found, who ? __ffs(who) - 1 : 0);
    } else {
        if (adds) role.launch.found = found;
        role.sync();
        found = role.launch.found;
        role.sync();  // nobody overwrites it before all have read it
    }
    fence_proxy_async_global();
    return found;
}

}  // namespace pk
