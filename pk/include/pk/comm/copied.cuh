#pragma once
/// Tiles that a communicator warp, or a team, takes from a tensor and puts into others, as they lie in memory: `pk.load`
/// and `pk.store` with nothing between.  Up to 16 bytes a thread and access, all loads of a tile under way at once.

#include "pk/comm/elements.cuh"

namespace pk {

/// Elements of a piece: up to 16 bytes that divide a row of `cols` elements of `size` bytes.
__host__ __device__ constexpr int copied_vector(int cols, int size) {
    int n = 16 / size;
    while (cols % n != 0) n /= 2;
    return n;
}

/// R rows by C columns in pieces of up to 16 bytes of a row, dealt to the lanes of WARPS warps in turn.
template <class T, int R, int C, int WARPS = 1>
struct copied_tile {
    using element = T;
    static constexpr int rows = R, cols = C, lanes = 32 * WARPS;

    static constexpr int vector = copied_vector(C, static_cast<int>(sizeof(T)));  // elements of a piece
    static constexpr int across = C / vector, pieces = R * across, slots = ceil_div(pieces, lanes);
    static constexpr int bytes = vector * static_cast<int>(sizeof(T)), words = ceil_div(bytes, 4);
    static constexpr bool aligned_rows = lanes % across == 0;  // a lane's pieces lie one below the other

    u32 word[slots][words];  // of each piece

    static PK_DEVICE bool holds(int slot, int lane) { return pieces % lanes == 0 || lanes * slot + lane < pieces; }
    static PK_DEVICE int row(int slot, int lane) {
        return aligned_rows ? lanes / across * slot + lane / across : (lanes * slot + lane) / across;
    }
    static PK_DEVICE int col(int slot, int lane) {
        return (aligned_rows ? lane : lanes * slot + lane) % across * vector;
    }
};

/// The bits of one element, in the low end of a word.
template <class T>
PK_DEVICE u32 element_bits(const piece<T, 1>& x) {
    if constexpr (sizeof(T) == 4) return reinterpret_cast<const u32&>(x);
    else if constexpr (sizeof(T) == 2) return reinterpret_cast<const u16&>(x);
    else return reinterpret_cast<const u8&>(x);
}

/// An element of the given bits.
template <class T>
PK_DEVICE piece<T, 1> element_of_bits(u32 bits) {
    piece<T, 1> x;
    if constexpr (sizeof(T) == 4) reinterpret_cast<u32&>(x) = bits;
    else if constexpr (sizeof(T) == 2) reinterpret_cast<u16&>(x) = static_cast<u16>(bits);
    else reinterpret_cast<u8&>(x) = static_cast<u8>(bits);
    return x;
}

/// Takes the first element of a piece in words and puts `bits` behind its last one, so that code for one element, in a
/// loop, does for all: unrolled, a piece at an edge needs more registers than one warp has.
template <class Tile>
PK_DEVICE void pass_element(u32 (&word)[Tile::words], u32 bits) {
    constexpr int wide = 8 * static_cast<int>(sizeof(typename Tile::element)), last = Tile::words - 1;
    if constexpr (wide == 32) {
#pragma unroll
        for (int i = 0; i < last; ++i) word[i] = word[i + 1];
        word[last] = bits;
    } else {
#pragma unroll
        for (int i = 0; i < last; ++i) word[i] = word[i] >> wide | word[i + 1] << (32 - wide);
        word[last] = word[last] >> wide | bits << ((Tile::bytes < 4 ? 8 * Tile::bytes : 32) - wide);
    }
}

/// A whole piece, aligned, from and to memory.
template <class Tile, class T>
PK_DEVICE void ld_words(u32* word, const T* p) {
    const auto x = ld_global_piece<T, Tile::vector>(p);
    if constexpr (Tile::bytes < 4) word[0] = Tile::bytes == 2 ? reinterpret_cast<const u16&>(x) : reinterpret_cast<const u8&>(x);
    else
#pragma unroll
        for (int i = 0; i < Tile::words; ++i) word[i] = reinterpret_cast<const u32*>(&x)[i];
}
template <class Tile, class T>
PK_DEVICE void st_words(T* p, const u32* word) {
    piece<T, Tile::vector> x;
    if constexpr (Tile::bytes == 1) reinterpret_cast<u8&>(x) = static_cast<u8>(word[0]);
    else if constexpr (Tile::bytes == 2) reinterpret_cast<u16&>(x) = static_cast<u16>(word[0]);
    else
#pragma unroll
        for (int i = 0; i < Tile::words; ++i) reinterpret_cast<u32*>(&x)[i] = word[i];
    st_global_piece(p, x);
}

/// Where a lane's pieces lie in a tensor, one after the other, from a hidden first address.
template <class Tile, class T>
struct copied_place {
    const window& place;
    T* const base;
    T* at;
    const int lane;

    PK_DEVICE copied_place(const window& w, T* b, int thread) : place(w), base(b), lane(hidden(thread)) {
        at = hidden(base + place.offset(Tile::row(0, lane), Tile::col(0, lane)));
    }
    PK_DEVICE void next(int slot) {
        if constexpr (Tile::aligned_rows) at += static_cast<long long>(Tile::lanes / Tile::across) * place.row_stride;
        else if (slot + 1 < Tile::slots) at = base + place.offset(Tile::row(slot + 1, lane), Tile::col(slot + 1, lane));
    }
    /// The elements of a piece that lie in the tensor: from `first` to `stop` - 1; none if it is not `mine`.
    PK_DEVICE void inside(int slot, bool mine, int& first, int& stop) const {
        const int from = hidden(lane), row = place.top + Tile::row(slot, from), col = place.left + Tile::col(slot, from);
        first = ::max(0, -col);
        stop = mine && 0 <= row && row < place.rows ? ::min(Tile::vector, place.cols - col) : 0;
    }
};

template <class Tile, class T>
PK_DEVICE bool whole_copy(const window& place, const T* base) {
    return place.holds(0, 0) && place.holds(Tile::rows - 1, Tile::cols - 1) && place.aligned(base, Tile::bytes);
}

/// The tile's window at `at` of a tensor; what lies outside the tensor becomes `other`.
template <class T, int R, int C, int WARPS, class Role, class View, class Other>
PK_DEVICE void load_copied(copied_tile<T, R, C, WARPS>& tile, const Role& role, const View& from, int rank, Other other,
                    const int (&at)[View::dims]) {
    static_assert(is_same<T, typename View::element>, "a copied tile has the type of its tensor");
    static_assert(Role::threads == 32 * WARPS, "a copied tile is dealt to all threads of the role");
    using Tile = copied_tile<T, R, C, WARPS>;
    const window place(from.shape, at);
    const T* base = from.of(rank);
    copied_place<Tile, const T> slot(place, base, role.thread());
    if (!role.dead && whole_copy<Tile>(place, base)) {
#pragma unroll
        for (int i = 0; i < Tile::slots; ++i) {
            if (Tile::holds(i, slot.lane)) ld_words<Tile>(tile.word[i], slot.at);
            slot.next(i);
        }
        return;
    }
    const bool aligned = place.aligned(base, Tile::bytes);
    const u32 outside = element_bits<T>(piece<T, 1>{{narrow_element<T>(other)}});
#pragma unroll
    for (int i = 0; i < Tile::slots; ++i) {
        int first, stop;
        slot.inside(i, !role.dead && Tile::holds(i, slot.lane), first, stop);
        if (aligned && first == 0 && stop == Tile::vector) {
            ld_words<Tile>(tile.word[i], slot.at);
        } else {
#pragma unroll
            for (int w = 0; w < Tile::words; ++w) tile.word[i][w] = 0;
            const T* from = slot.at;
#pragma unroll 1
            for (int e = 0; e < Tile::vector; ++e) {
                u32 bits = outside;
                if (first <= e && e < stop) bits = element_bits<T>(ld_global_piece<T, 1>(from));
                pass_element<Tile>(tile.word[i], bits);
                from += place.col_stride;
            }
        }
        slot.next(i);
    }
}

/// The first `rows` rows of the tile to its window at `at` of a tensor; what lies outside the tensor is dropped.
template <class T, int R, int C, int WARPS, class Role, class View>
PK_DEVICE void store_copied(const View& to, int rank, const copied_tile<T, R, C, WARPS>& tile, const Role& role, int rows,
                     const int (&at)[View::dims]) {
    static_assert(is_same<T, typename View::element>, "a copied tile has the type of its tensor");
    using Tile = copied_tile<T, R, C, WARPS>;
    if (role.dead) return;
    const window place(to.shape, at);
    T* base = to.of(rank);
    copied_place<Tile, T> slot(place, base, role.thread());
    if (rows >= R && whole_copy<Tile>(place, base)) {
#pragma unroll
        for (int i = 0; i < Tile::slots; ++i) {
            if (Tile::holds(i, slot.lane)) st_words<Tile>(slot.at, tile.word[i]);
            slot.next(i);
        }
        return;
    }
    const bool aligned = place.aligned(base, Tile::bytes);
#pragma unroll
    for (int i = 0; i < Tile::slots; ++i) {
        int first, stop;
        slot.inside(i, Tile::holds(i, slot.lane) && Tile::row(i, slot.lane) < rows, first, stop);
        if (aligned && first == 0 && stop == Tile::vector) {
            st_words<Tile>(slot.at, tile.word[i]);
        } else if (first < stop) {
            u32 rest[Tile::words];
#pragma unroll
            for (int w = 0; w < Tile::words; ++w) rest[w] = tile.word[i][w];
            T* to_element = slot.at;
#pragma unroll 1
            for (int e = 0; e < stop; ++e) {
                if (first <= e) st_global_piece(to_element, element_of_bits<T>(rest[0]));
                pass_element<Tile>(rest, 0);
                to_element += place.col_stride;
            }
        }
        slot.next(i);
    }
}

/// The same to every rank's copy.
template <class Tile, class Role, class View>
PK_DEVICE void store_copied_everywhere(const View& to, const Tile& tile, const Role& role, int rows, const int (&at)[View::dims]) {
#pragma unroll 1
    for (int rank = 0; rank < static_cast<int>(role.ctx.world); ++rank) store_copied(to, rank, tile, role, rows, at);
}

}  // namespace pk
