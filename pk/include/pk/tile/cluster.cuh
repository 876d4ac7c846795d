#pragma once
/// Loads that the two blocks of a cluster share: each fetches half of the tile for both.

#include "pk/ptx/cluster.cuh"
#include "pk/tile/ops.cuh"

namespace pk {

inline constexpr int cluster_blocks = 2;

/// Tensor to the shared tile of both blocks.  Both call this with the same coordinates; each fetches one half of the
/// panels, or of the rows of every panel, and its `bar` has been told to expect the whole tile.
template <class Tile, class... Coord>
PK_DEVICE void load_expected_shared(Tile& tile, const tensor_map& map, mbarrier& bar, Coord... coord) {
    constexpr int dims = sizeof...(Coord);
    constexpr bool by_panels = Tile::panels % cluster_blocks == 0;
    constexpr int panels = by_panels ? Tile::panels / cluster_blocks : Tile::panels;
    constexpr int rows = by_panels ? Tile::rows : Tile::rows / cluster_blocks;
    constexpr int box_rows = Tile::box_rows < rows ? Tile::box_rows : rows;
    static_assert(dims > 1 || Tile::rows == 1, "a tile of several rows needs a tensor of at least 2 dimensions");
    static_assert(by_panels || rows % 8 == 0, "halves of a panel are a multiple of 8 rows");
    const int half = cluster_rank();
    const int first_panel = by_panels ? half * panels : 0, first_row = by_panels ? 0 : half * rows;
#pragma unroll
    for (int panel = 0; panel < panels; ++panel)
#pragma unroll
        for (int row = 0; row < rows; row += box_rows) {
            int at[dims] = {coord...};
            at[dims - 1] += (first_panel + panel) * Tile::panel_cols;
            if constexpr (dims > 1) at[dims - 2] += first_row + row;
            tma_load_multicast(tile.address(first_panel + panel, first_row + row), map, bar, at, (1 << cluster_blocks) - 1);
        }
}

/// The same, and `bar` expects the whole tile.
template <class Tile, class... Coord>
PK_DEVICE void load_async_shared(Tile& tile, const tensor_map& map, mbarrier& bar, Coord... coord) {
    mbarrier_expect(bar, Tile::bytes);
    load_expected_shared(tile, map, bar, coord...);
}

}  // namespace pk
