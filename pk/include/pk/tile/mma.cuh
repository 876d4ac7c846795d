#pragma once
/// acc += a @ b on the tensor core.  Operands are shared tiles as stored or transposed; a may be a 16-bit register tile.
/// 8-bit and 32-bit (tf32) operands must be contiguous along k: a as stored, b transposed.

#include "pk/tile/ops.cuh"

namespace pk {

/// An operand contiguous along k: the tile's rows are m (or n), its columns k.
template <class Tile>
struct k_major {
    static constexpr int transposed = 0;
    static constexpr int extent = Tile::rows;  // along m or n
    static constexpr int depth = Tile::cols;   // along k

    /// Descriptor of k step 0 from row `first` on.
    static PK_DEVICE u64 descriptor(const Tile& tile, int first) {
        return matrix_descriptor(tile.address(0, first), 16, 8 * Tile::panel_bytes, Tile::swizzle);
    }

    /// What to add to the descriptor for k step `step` (32 bytes of k): inside a panel, then the next panel.
    static constexpr __device__ u32 advance(int step) {
        return (32 * step / Tile::panel_bytes * (Tile::rows * Tile::panel_bytes) + 32 * step % Tile::panel_bytes) / 16;
    }
};

/// An operand contiguous along m (or n): the tile's rows are k, its columns m (or n).
template <class Tile>
struct mn_major {
    static constexpr int transposed = 1;
    static constexpr int extent = Tile::cols;
    static constexpr int depth = Tile::rows;

    /// Descriptor of k step 0 from column `first` (a multiple of a panel) on.
    static PK_DEVICE u64 descriptor(const Tile& tile, int first) {
        return matrix_descriptor(tile.address(first / Tile::panel_cols), Tile::rows * Tile::panel_bytes,
                                 8 * Tile::panel_bytes, Tile::swizzle);
    }

    /// What to add to the descriptor for k step `step`: 16 rows (the elements are 16-bit).
    static constexpr __device__ u32 advance(int step) { return 16 * step * Tile::panel_bytes / 16; }
};

// How each way of writing an operand is stored: a (M, K), b (K, N).
template <class A> struct left_operand { using layout = k_major<A>; };
template <class S> struct left_operand<transposed_tile<S>> { using layout = mn_major<S>; };
template <class B> struct right_operand { using layout = mn_major<B>; };
template <class S> struct right_operand<transposed_tile<S>> { using layout = k_major<S>; };

/// The shared tile behind an operand.
template <class T, int R, int C>
PK_DEVICE const shared_tile<T, R, C>& storage(const shared_tile<T, R, C>& tile) { return tile; }
template <class S>
PK_DEVICE const S& storage(const transposed_tile<S>& view) { return view.stored; }

/// Keeps the compiler from moving accesses of a register tile across this point; emits nothing.
template <class T, int R, int C>
PK_DEVICE void pin(register_tile<T, R, C>& tile) {
#pragma unroll
    for (int s = 0; s < tile.slabs; ++s)
#pragma unroll
        for (int i = 0; i < tile.words; ++i) {
            if constexpr (is_same<T, float>) asm volatile("" : "+f"(tile.data[s][i]) :: "memory");
            else asm volatile("" : "+r"(tile.data[s][i]) :: "memory");
        }
}

/// All elements of an accumulator take one value.  The fence here keeps ptxas from inserting one of its own where warps may
/// have diverged (in a wait behind the loop that multiplies), which would serialise every mma (C7519).
template <int R, int C>
PK_DEVICE void fill(accumulator<R, C>& acc, float value) {
    fill(static_cast<register_tile<float, R, C>&>(acc), value);
    acc.empty = false;
    wgmma_fence();
}

/// Whether the tensor core multiplies elements of types T and U.
template <class T, class U>
inline constexpr bool multiplies = sizeof(T) == 1 ? sizeof(U) == 1 : is_same<T, U>;

/// acc += a @ b, issued but neither committed nor waited for.  a (G R, K) and b (K, C) in shared memory.
template <int R, int C, class A, class B>
PK_DEVICE void mma(accumulator<R, C>& acc, const A& a, const B& b, int warpgroup) {
    using left = typename left_operand<A>::layout;
    using right = typename right_operand<B>::layout;
    using T = typename A::element;
    using U = typename B::element;
    constexpr int step = 32 / sizeof(T);  // elements of k in one instruction
    static_assert(multiplies<T, U>, "mma takes operands of one 16-bit type, of 8-bit types, or of float");
    static_assert(sizeof(T) == 2 || !(left::transposed || right::transposed), "8-bit and 32-bit operands: contiguous along k");
    static_assert(left::extent % R == 0, "the warpgroups' rows must fill a");
    static_assert(right::extent == C && left::depth == right::depth, "shapes: a (M, K), b (K, N), acc (M, N)");
    static_assert(left::depth % step == 0, "K of one mma must be a multiple of 32 bytes");
    static_assert(C <= 256, "N of one mma is at most 256");

    const u64 b_start = right::descriptor(storage(b), 0);
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < acc.slabs; ++s) {
        const u64 a_start = left::descriptor(storage(a), warpgroup * R + 64 * s);
#pragma unroll
        for (int k = 0; k < left::depth / step; ++k)
            wgmma<C>::template ss<T, U, left::transposed, right::transposed>(
                acc.data[s], a_start + left::advance(k), b_start + right::advance(k), k > 0 || !acc.empty);
    }
    acc.empty = false;
}

/// acc += a @ b with a (this warpgroup's rows) in registers, which must not change before the mma has been waited for.
template <int R, int C, int K, class T, class B>
PK_DEVICE void mma(accumulator<R, C>& acc, register_tile<T, R, K>& a, const B& b, int) {
    using right = typename right_operand<B>::layout;
    static_assert(sizeof(T) == 2 && is_same<T, typename B::element>, "mma from registers takes bfloat16 or float16 tiles");
    static_assert(right::extent == C && right::depth == K, "shapes: a (M, K), b (K, N), acc (M, N)");
    static_assert(K % 16 == 0, "K of one mma must be a multiple of 16");
    static_assert(C <= 256, "N of one mma is at most 256");

    const u64 b_start = right::descriptor(storage(b), 0);
    pin(acc);
    pin(a);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < acc.slabs; ++s)
#pragma unroll
        for (int k = 0; k < K / 16; ++k)
            wgmma<C>::template rs<T, right::transposed>(acc.data[s], a.data[s][4 * k], a.data[s][4 * k + 1],
                                                        a.data[s][4 * k + 2], a.data[s][4 * k + 3],
                                                        b_start + right::advance(k), k > 0 || !acc.empty);
    acc.empty = false;
}

/// The same with an a that has no name.
template <int R, int C, int K, class T, class B>
PK_DEVICE void mma(accumulator<R, C>& acc, register_tile<T, R, K>&& a, const B& b, int warpgroup) {
    mma(acc, a, b, warpgroup);
}

/// acc = a @ b: the mma that follows overwrites what the accumulator holds.
template <int R, int C, class A, class B>
PK_DEVICE void mma_over(accumulator<R, C>& acc, A&& a, const B& b, int warpgroup) {
    zero(acc);
    mma(acc, a, b, warpgroup);
}

/// Waits for every committed mma of this warpgroup; afterwards the elements of `acc` may be read and written.
template <int R, int C>
PK_DEVICE void mma_finish(accumulator<R, C>& acc) {
    wgmma_wait<0>();
    pin(acc);
    if (acc.empty) {
        fill(static_cast<register_tile<float, R, C>&>(acc), 0.0f);
        pin(acc);  // keeps this a branch, rather than a select for every element
    }
    acc.empty = false;
}

}  // namespace pk
