#pragma once
/// Tiles in shared memory, in the one layout that TMA, the tensor core and stmatrix agree on.
///
/// A tile of R rows of C elements is stored as column panels of `panel_bytes` (the swizzle width), each R rows, rows
/// contiguous; inside a panel the 16-byte chunks of a row are permuted in TMA's pattern of that width.

#include "pk/ptx/misc.cuh"

namespace pk {

/// Widest swizzle whose panels fill rows of `row_bytes` exactly: 128, 64 or 32, or 0 for one plain panel.
__host__ __device__ constexpr int swizzle_of(int row_bytes) {
    return row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : row_bytes % 32 == 0 ? 32 : 0;
}

template <class T, int R, int C>
struct alignas(1024) shared_tile {
    using element = T;
    static constexpr int rows = R;
    static constexpr int cols = C;
    static constexpr int row_bytes = C * static_cast<int>(sizeof(T));
    static constexpr int swizzle = swizzle_of(row_bytes);
    static constexpr int panel_bytes = swizzle ? swizzle : row_bytes;          // of one row of a panel
    static constexpr int panel_cols = panel_bytes / static_cast<int>(sizeof(T));
    static constexpr int panels = row_bytes / panel_bytes;
    static constexpr int box_rows = R / ceil_div(R, 256);                      // rows that one TMA box moves
    static constexpr int bytes = R * row_bytes;
    static_assert(row_bytes % 16 == 0, "a row of a shared tile must be a multiple of 16 bytes");
    static_assert(panel_cols <= 256, "an unswizzled row of more than 256 elements does not fit a TMA box");
    static_assert(R % box_rows == 0 && (R <= 256 || box_rows % 8 == 0), "rows above 256 must split into equal boxes");

    u8 memory[bytes];

    /// Address of the first byte of panel `panel`, row `row`.
    PK_DEVICE u32 address(int panel = 0, int row = 0) const {
        return shared_address(memory) + panel * (R * panel_bytes) + row * panel_bytes;
    }

    /// What the swizzle does to the 16-byte chunk number in `row`: it is XORed with this.
    static PK_DEVICE int permutation(int row) {
        if constexpr (swizzle == 128) return row & 7;
        else if constexpr (swizzle == 64) return (row >> 1) & 3;
        else if constexpr (swizzle == 32) return (row >> 2) & 1;
        else return 0;
    }

    /// Address of the element at (row, col); col must be a multiple of the elements of an access.
    PK_DEVICE u32 element_address(int row, int col) const {
        const int byte = col * static_cast<int>(sizeof(T));
        const int chunk = byte % panel_bytes / 16 ^ permutation(row);
        return address(byte / panel_bytes, row) + chunk * 16 + byte % 16;
    }
};

/// `t.T`: the same storage read as (C, R).
template <class Tile>
struct transposed_tile {
    using element = typename Tile::element;
    static constexpr int rows = Tile::cols;
    static constexpr int cols = Tile::rows;
    const Tile& stored;
};

/// The transposed view of a shared tile.
template <class T, int R, int C>
PK_DEVICE transposed_tile<shared_tile<T, R, C>> transposed(const shared_tile<T, R, C>& tile) { return {tile}; }

}  // namespace pk
