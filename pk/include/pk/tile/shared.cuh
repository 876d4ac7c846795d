#pragma once
/// Tiles in shared memory, in the one layout that TMA, the tensor core and stmatrix agree on.
///
/// A tile of R rows of C elements is stored as column panels of `panel_bytes` (the swizzle width), each R rows, rows
/// contiguous; inside a panel the 16-byte chunks of a row are permuted in TMA's pattern of that width.  The patterns
/// repeat every 8 rows: tiles of other heights (vectors) are plain, their panels as wide as a box may be.

#include "pk/ptx/misc.cuh"

namespace pk {

/// Widest swizzle whose panels fill rows of `row_bytes` exactly: 128, 64 or 32, or 0 for one plain panel.
__host__ __device__ constexpr int swizzle_of(int row_bytes) {
    return row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : row_bytes % 32 == 0 ? 32 : 0;
}

/// Bytes of a row of one plain panel: the whole row, or at most 256 elements of a tile that is never swizzled, panels
/// beginning at multiples of 128 bytes.
__host__ __device__ constexpr int plain_panel(int rows, int cols, int size) {
    for (int n = 1; rows % 8 != 0 && n <= cols; ++n) {
        const int width = cols / n;
        if (cols % n == 0 && width <= 256 && width * size % 16 == 0 && (n == 1 || rows * width * size % 128 == 0))
            return width * size;
    }
    return cols * size;
}

/// ROWS: copied row by row (`gather_async`, `scatter_async`) instead of by TMA.  Rows are then contiguous and 16 bytes
/// apart, so that lanes that touch the same columns of neighbouring rows meet no bank twice.
template <class T, int R, int C, bool ROWS = false>
struct alignas(1024) shared_tile {
    using element = T;
    static constexpr int rows = R;
    static constexpr int cols = C;
    static constexpr int row_bytes = C * static_cast<int>(sizeof(T));
    static constexpr int swizzle = !ROWS && R % 8 == 0 ? swizzle_of(row_bytes) : 0;
    static constexpr int panel_bytes = ROWS ? row_bytes + 16 : swizzle ? swizzle : plain_panel(R, C, sizeof(T));  // of one row of a panel
    static constexpr int panel_cols = panel_bytes / static_cast<int>(sizeof(T));
    static constexpr int panels = ROWS ? 1 : row_bytes / panel_bytes;
    static constexpr int box_rows = R / ceil_div(R, 256);                      // rows that one TMA box moves
    static constexpr int bytes = ROWS ? R * panel_bytes : R * row_bytes;
    static_assert(row_bytes % 16 == 0, "a row of a shared tile must be a multiple of 16 bytes");
    static_assert(ROWS || panel_cols <= 256, "a panel of more than 256 elements does not fit a TMA box");
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
template <class T, int R, int C, bool ROWS>
PK_DEVICE transposed_tile<shared_tile<T, R, C, ROWS>> transposed(const shared_tile<T, R, C, ROWS>& tile) { return {tile}; }

}  // namespace pk
