#pragma once
/// What moves and multiplies tiles: TMA between tensors and shared tiles, register tiles to and from shared tiles, mma.
/// Warpgroup g of a role holds rows g R .. (g + 1) R - 1 of a tile, R being the rows of its register tile.

#include "pk/ptx/ld_st.cuh"
#include "pk/ptx/tma.cuh"
#include "pk/ptx/wgmma.cuh"
#include "pk/tile/register.cuh"
#include "pk/tile/shared.cuh"

namespace pk {

// -- TMA: called by one thread --------------------------------------------------------------------------------
/// Calls `move(address, at)` for every box of a tile whose first element lies at `at` in the tensor.
template <class Tile, class Move, class... Coord>
PK_DEVICE void for_each_box(const Tile& tile, Move move, Coord... coord) {
    constexpr int dims = sizeof...(Coord);
    static_assert(1 <= dims && dims <= 4, "tensors have 1 to 4 dimensions");
    static_assert(dims > 1 || Tile::rows == 1, "a tile of several rows needs a tensor of at least 2 dimensions");
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel)
#pragma unroll
        for (int row = 0; row < Tile::rows; row += Tile::box_rows) {
            int at[dims] = {coord...};
            at[dims - 1] += panel * Tile::panel_cols;
            if constexpr (dims > 1) at[dims - 2] += row;
            move(tile.address(panel, row), at);
        }
}

// One box each, for `for_each_box`.  Not lambdas: NVRTC 13.0 takes the call operator of a generic lambda for a host function.
struct load_box {
    const tensor_map& map;
    mbarrier& bar;
    template <int DIMS> PK_DEVICE void operator()(u32 to, int (&at)[DIMS]) const { tma_load(to, map, bar, at); }
};
struct store_box {
    const tensor_map& map;
    template <int DIMS> PK_DEVICE void operator()(u32 from, int (&at)[DIMS]) const { tma_store(map, from, at); }
};
struct store_add_box {
    const tensor_map& map;
    template <int DIMS> PK_DEVICE void operator()(u32 from, int (&at)[DIMS]) const { tma_store_add(map, from, at); }
};

/// The only arrival of a stage: all that will be loaded into it, which follows.
template <class... Tile>
PK_DEVICE void expect_loads(mbarrier& bar, const Tile&...) { mbarrier_arrive_expect(bar, (... + Tile::bytes)); }

/// Tensor to shared tile; `bar` has been told to expect the bytes.
template <class Tile, class... Coord>
PK_DEVICE void load_expected(Tile& tile, const tensor_map& map, mbarrier& bar, Coord... coord) {
    for_each_box(tile, load_box{map, bar}, coord...);
}

/// Tensor to shared tile; `bar` expects the bytes and its phase ends when they have landed.
template <class Tile, class... Coord>
PK_DEVICE void load_async(Tile& tile, const tensor_map& map, mbarrier& bar, Coord... coord) {
    mbarrier_expect(bar, Tile::bytes);
    load_expected(tile, map, bar, coord...);
}

/// Shared tile to tensor; part of this thread's next `store_commit`.
template <class Tile, class... Coord>
PK_DEVICE void store_async(const tensor_map& map, const Tile& tile, Coord... coord) {
    for_each_box(tile, store_box{map}, coord...);
}

/// Shared tile added to the tensor, element by element, atomically; part of this thread's next `store_commit`.
template <class Tile, class... Coord>
PK_DEVICE void store_add_async(const tensor_map& map, const Tile& tile, Coord... coord) {
    for_each_box(tile, store_add_box{map}, coord...);
}

// -- registers <-> shared: called by every thread of the warpgroup -----------------------------------------------
/// Where this thread's part of a shared tile lies: `start` (of panel 0, chunk 0 of its row) and the swizzle it needs.
template <class Tile>
struct fragment_address {
    u32 start;

    /// `chunk`: offset of this lane's access inside a group of `16 * 2` bytes: its 16-byte chunk (0 or 1) and byte in it.
    PK_DEVICE fragment_address(const Tile& tile, int row, int chunk, int byte)
        : start(tile.address(0, row) + ((Tile::permutation(row) ^ chunk) * 16 + byte)) {}

    /// Address `bytes` (a compile-time multiple of 32 after unrolling) further along the row, `rows` (of 8) below.
    PK_DEVICE u32 at(int bytes, int rows) const {
        const u32 panel = bytes / Tile::panel_bytes * (Tile::rows * Tile::panel_bytes) + rows * Tile::panel_bytes;
        const u32 inside = bytes % Tile::panel_bytes;
        return (Tile::swizzle ? start ^ inside : start + inside) + panel;
    }
};

/// First row, in the tile, of the 16 rows of this warp in slab 0.
template <int R>
PK_DEVICE int first_row(int warpgroup) { return warpgroup * R + threadIdx.x / 32 % 4 * 16; }

/// Registers to shared tile, rounded to its element type.
template <class T, class U, int RS, int R, int C, bool ROWS>
PK_DEVICE void store(shared_tile<T, RS, C, ROWS>& to, const register_tile<U, R, C>& from, int warpgroup) {
    static_assert(RS % R == 0, "the warpgroups' rows must fill the shared tile");
    using Tile = shared_tile<T, RS, C, ROWS>;
    const int lane = lane_index();
    if constexpr (sizeof(T) == 2) {
        const fragment_address<Tile> place(to, first_row<R>(warpgroup) + lane % 16, lane / 16, 0);
#pragma unroll
        for (int s = 0; s < from.slabs; ++s) {
#pragma unroll
            for (int j = 0; j + 1 < C / 8; j += 2)
                stmatrix_x4(place.at(16 * j, 64 * s), pair<T>(from, s, j, 0), pair<T>(from, s, j, 1),
                            pair<T>(from, s, j + 1, 0), pair<T>(from, s, j + 1, 1));
            if constexpr (C / 8 % 2 == 1) {
                constexpr int j = C / 8 - 1;
                stmatrix_x2(place.at(16 * j, 64 * s), pair<T>(from, s, j, 0), pair<T>(from, s, j, 1));
            }
        }
    } else {
        static_assert(is_same<T, U>, "cast before storing to a 32-bit tile");
        const fragment_address<Tile> place(to, first_row<R>(warpgroup) + lane / 4, lane % 4 / 2, lane % 2 * 8);
#pragma unroll
        for (int s = 0; s < from.slabs; ++s)
#pragma unroll
            for (int j = 0; j < C / 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const T x = from.data[s][4 * j + 2 * i], y = from.data[s][4 * j + 2 * i + 1];
                    st_shared(place.at(32 * j, 64 * s + 8 * i), reinterpret_cast<const u32&>(x),
                              reinterpret_cast<const u32&>(y));
                }
    }
}

/// As above, of a whole accumulator.
template <class T, int RS, int R, int C, bool ROWS>
PK_DEVICE void store(shared_tile<T, RS, C, ROWS>& to, const accumulator<R, C>& from, int warpgroup) {
    store(to, static_cast<const register_tile<float, R, C>&>(from), warpgroup);
}

/// Of the 8x8 blocks of a transposed fragment, the row of a block that this lane addresses: the 16 rows of the fragment
/// from `col` on are columns of the stored tile, its 16 columns rows of it.
template <class Tile>
struct turned_blocks {
    static_assert(!Tile::swizzle || Tile::panel_cols == 64, "64 columns of 16 bits, or more, are panels of 128 bytes");
    static constexpr u32 slab_bytes = Tile::swizzle ? Tile::rows * Tile::panel_bytes : 64 * sizeof(typename Tile::element);
    u32 start;

    PK_DEVICE turned_blocks(const Tile& stored, int col)
        : start(stored.element_address(lane_index() / 16 * 8 + lane_index() % 8, col + lane_index() / 8 % 2 * 8)) {}

    /// Of the blocks from stored row `row`, a multiple of 8, on, `slab` times 64 columns further.
    PK_DEVICE u32 at(int row, int slab) const { return start + row * Tile::panel_bytes + slab * slab_bytes; }
};

/// Where element `i` of a thread's fragment of rows from `col` on lies in the stored tile, whose transpose it is.
template <class Tile>
PK_DEVICE u32 turned_address(const Tile& stored, int i, int col) {
    const int lane = lane_index();
    return stored.element_address(i / 4 * 8 + lane % 4 * 2 + i % 2, col + lane / 4 + i % 4 / 2 * 8);
}

/// Registers to the transposed view of a shared tile: element (r, c) goes to row c, column r.
template <class T, class U, int RS, bool ROWS, int R, int C>
PK_DEVICE void store(transposed_tile<shared_tile<T, C, RS, ROWS>> to, const register_tile<U, R, C>& from, int warpgroup) {
    static_assert(RS % R == 0, "the warpgroups' rows must fill the shared tile");
    const int row = first_row<R>(warpgroup);
    if constexpr (sizeof(T) == 2) {
        const turned_blocks<shared_tile<T, C, RS, ROWS>> place(to.stored, row);
#pragma unroll
        for (int s = 0; s < from.slabs; ++s) {
#pragma unroll
            for (int j = 0; j + 1 < C / 8; j += 2)
                stmatrix_x4_transposed(place.at(8 * j, s), pair<T>(from, s, j, 0), pair<T>(from, s, j, 1),
                                       pair<T>(from, s, j + 1, 0), pair<T>(from, s, j + 1, 1));
            if constexpr (C / 8 % 2 == 1) {
                constexpr int j = C / 8 - 1;
                stmatrix_x2_transposed(place.at(8 * j, s), pair<T>(from, s, j, 0), pair<T>(from, s, j, 1));
            }
        }
    } else {
        static_assert(is_same<T, U>, "cast before storing to a 32-bit tile");
#pragma unroll
        for (int s = 0; s < from.slabs; ++s)
#pragma unroll
            for (int i = 0; i < C / 2; ++i) {
                const T x = from.data[s][i];
                st_shared(turned_address(to.stored, i, row + 64 * s), reinterpret_cast<const u32&>(x));
            }
    }
}

/// As above, of a whole accumulator.
template <class T, int RS, bool ROWS, int R, int C>
PK_DEVICE void store(transposed_tile<shared_tile<T, C, RS, ROWS>> to, const accumulator<R, C>& from, int warpgroup) {
    store(to, static_cast<const register_tile<float, R, C>&>(from), warpgroup);
}

/// Rows of this warpgroup of a shared tile, to registers; 16-bit elements widen to float.
template <int R, class T, int RS, int C, bool ROWS>
PK_DEVICE auto load(const shared_tile<T, RS, C, ROWS>& from, int warpgroup) {
    static_assert(RS % R == 0, "the warpgroups' rows must fill the shared tile");
    using Tile = shared_tile<T, RS, C, ROWS>;
    const int lane = lane_index();
    register_tile<T, R, C> tile;
    if constexpr (sizeof(T) == 2) {
        const fragment_address<Tile> place(from, first_row<R>(warpgroup) + lane % 16, lane / 16, 0);
#pragma unroll
        for (int s = 0; s < tile.slabs; ++s) {
#pragma unroll
            for (int j = 0; j + 1 < C / 8; j += 2)
                ldmatrix_x4(place.at(16 * j, 64 * s), tile.data[s][2 * j], tile.data[s][2 * j + 1], tile.data[s][2 * j + 2],
                            tile.data[s][2 * j + 3]);
            if constexpr (C / 8 % 2 == 1) {
                constexpr int j = C / 8 - 1;
                ldmatrix_x2(place.at(16 * j, 64 * s), tile.data[s][2 * j], tile.data[s][2 * j + 1]);
            }
        }
        return cast<float>(tile);
    } else {
        const fragment_address<Tile> place(from, first_row<R>(warpgroup) + lane / 4, lane % 4 / 2, lane % 2 * 8);
#pragma unroll
        for (int s = 0; s < tile.slabs; ++s)
#pragma unroll
            for (int j = 0; j < C / 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    u32 x, y;
                    ld_shared(place.at(32 * j, 64 * s + 8 * i), x, y);
                    tile.data[s][4 * j + 2 * i] = reinterpret_cast<const T&>(x);
                    tile.data[s][4 * j + 2 * i + 1] = reinterpret_cast<const T&>(y);
                }
        return tile;
    }
}

/// As above, of the transposed view of a shared tile: element (r, c) is that in row c, column r.
template <int R, class T, int C, int RS, bool ROWS>
PK_DEVICE auto load(transposed_tile<shared_tile<T, C, RS, ROWS>> from, int warpgroup) {
    static_assert(RS % R == 0, "the warpgroups' rows must fill the shared tile");
    const int row = first_row<R>(warpgroup);
    register_tile<T, R, C> tile;
    if constexpr (sizeof(T) == 2) {
        const turned_blocks<shared_tile<T, C, RS, ROWS>> place(from.stored, row);
#pragma unroll
        for (int s = 0; s < tile.slabs; ++s) {
#pragma unroll
            for (int j = 0; j + 1 < C / 8; j += 2)
                ldmatrix_x4_transposed(place.at(8 * j, s), tile.data[s][2 * j], tile.data[s][2 * j + 1],
                                       tile.data[s][2 * j + 2], tile.data[s][2 * j + 3]);
            if constexpr (C / 8 % 2 == 1) {
                constexpr int j = C / 8 - 1;
                ldmatrix_x2_transposed(place.at(8 * j, s), tile.data[s][2 * j], tile.data[s][2 * j + 1]);
            }
        }
        return cast<float>(tile);
    } else {
#pragma unroll
        for (int s = 0; s < tile.slabs; ++s)
#pragma unroll
            for (int i = 0; i < C / 2; ++i) {
                u32 x;
                ld_shared(turned_address(from.stored, i, row + 64 * s), x);
                tile.data[s][i] = reinterpret_cast<const T&>(x);
            }
        return tile;
    }
}

}  // namespace pk
