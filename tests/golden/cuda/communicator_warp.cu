// gather: emitted by pk for sm_90a.
//
//   x: Global   2-d bfloat16
//   out: Global   3-d bfloat16
//   R=32 C=64 DYNAMIC=False SIGNAL=True WAIT=True CLUSTER=1 SMS=0
//
//   back: loader -> storer, 2 stages of 4096 bytes
#include "pk/pk.cuh"

using namespace pk;

// -------------------------------------------------------------------------------------------------- config
struct config {
    static constexpr int threads = 128;
    // The last warpgroup: one warp a role, and one that opens and closes the launch.
    static constexpr int loader_warp = 0;
    static constexpr int storer_warp = 1;
    static constexpr int launch_warp = 2;
    static constexpr int communicator_warp = 3;
};

// Places that may wait, numbered as in the table of the host (Source.sites).
enum site : int {
    SITE_READY_WAIT = 0,        // loader: pk.wait(ready, (i, m), 2 * cols)
    SITE_BACK_FILL = 1,         // loader: with back.fill() as s:
    SITE_BACK_DRAIN = 2,        // storer: with back.drain() as s:
    SITE_FULL_STORE = 3,        // communicator: pk.store(full[r], t, pk.at(me, m * R + half * (R // 2), n * C))
    SITE_READY_SIGNAL_ALL = 4,  // communicator: pk.signal_all(ready, (me, m), 2)
    SITE_ENTRY = 5,             // launch: every rank has begun
    SITE_EXIT = 6,              // launch: every rank has finished
};

// ---------------------------------------------------------------------------------------------- parameters
struct alignas(64) params {
    tensor_map full_map;    // box (1, 32, 64), swizzle 128
    tensor_map out_map;     // box (1, 32, 64), swizzle 128
    context ctx;
    bf16* out;              // this rank's copy
    bf16* x;                // this rank's copy
    bf16* full_peers[max_ranks];
    int x_rows;             // x.0
    int x_cols;             // x.1
    int out_depth;          // out.0
    int out_rows;           // out.1
    int out_cols;           // out.2
    int out_stride_depth;   // out.stride.0
    int out_stride_rows;    // out.stride.1
    int out_stride_cols;    // out.stride.2
    int x_stride_rows;      // x.stride.0
    int x_stride_cols;      // x.stride.1
    int full_depth;         // full.0
    int full_rows;          // full.1
    int full_cols;          // full.2
    int full_stride_depth;  // full.stride.0
    int full_stride_rows;   // full.stride.1
    int full_stride_cols;   // full.stride.2
    int ready_offset;       // ready.offset
    int ready_shape_0;      // ready.0
    int ready_shape_1;      // ready.1
};
static_assert(PK_OFFSETOF(params, full_map) == 0, "pk: params.full_map");
static_assert(PK_OFFSETOF(params, out_map) == 128, "pk: params.out_map");
static_assert(PK_OFFSETOF(params, ctx) == 256, "pk: params.ctx");
static_assert(PK_OFFSETOF(params, out) == 384, "pk: params.out");
static_assert(PK_OFFSETOF(params, x) == 392, "pk: params.x");
static_assert(PK_OFFSETOF(params, full_peers) == 400, "pk: params.full_peers");
static_assert(PK_OFFSETOF(params, x_rows) == 464, "pk: params.x_rows");
static_assert(PK_OFFSETOF(params, x_cols) == 468, "pk: params.x_cols");
static_assert(PK_OFFSETOF(params, out_depth) == 472, "pk: params.out_depth");
static_assert(PK_OFFSETOF(params, out_rows) == 476, "pk: params.out_rows");
static_assert(PK_OFFSETOF(params, out_cols) == 480, "pk: params.out_cols");
static_assert(PK_OFFSETOF(params, out_stride_depth) == 484, "pk: params.out_stride_depth");
static_assert(PK_OFFSETOF(params, out_stride_rows) == 488, "pk: params.out_stride_rows");
static_assert(PK_OFFSETOF(params, out_stride_cols) == 492, "pk: params.out_stride_cols");
static_assert(PK_OFFSETOF(params, x_stride_rows) == 496, "pk: params.x_stride_rows");
static_assert(PK_OFFSETOF(params, x_stride_cols) == 500, "pk: params.x_stride_cols");
static_assert(PK_OFFSETOF(params, full_depth) == 504, "pk: params.full_depth");
static_assert(PK_OFFSETOF(params, full_rows) == 508, "pk: params.full_rows");
static_assert(PK_OFFSETOF(params, full_cols) == 512, "pk: params.full_cols");
static_assert(PK_OFFSETOF(params, full_stride_depth) == 516, "pk: params.full_stride_depth");
static_assert(PK_OFFSETOF(params, full_stride_rows) == 520, "pk: params.full_stride_rows");
static_assert(PK_OFFSETOF(params, full_stride_cols) == 524, "pk: params.full_stride_cols");
static_assert(PK_OFFSETOF(params, ready_offset) == 528, "pk: params.ready_offset");
static_assert(PK_OFFSETOF(params, ready_shape_0) == 532, "pk: params.ready_shape_0");
static_assert(PK_OFFSETOF(params, ready_shape_1) == 536, "pk: params.ready_shape_1");
static_assert(sizeof(params) == 576, "pk: params");

// ------------------------------------------------------------------------------------------- shared memory
struct shared_map {
    struct back_stage {
        shared_tile<bf16, 32, 64> x;
    };
    back_stage back[2];
    pipeline<2> back_ring;
    launch_state launch;
};
static_assert(sizeof(shared_map) <= 9216);

using loader_role = role<1, config::loader_warp>;
using storer_role = role<1, config::storer_warp>;
using communicator_role = role<1, config::communicator_warp>;
using launch_role = role<1, config::launch_warp>;

// -------------------------------------------------------------------------------------------------- loader
PK_DEVICE void loader(const params& p, shared_map& shared) {
    loader_role role(p.ctx, shared.launch);
    prefetch(p.full_map);
    cursor<2> back_at;
    const signal_array<2> ready(p.ready_offset, p.ready_shape_0, p.ready_shape_1);
    int task = blockIdx.x;  // the block's next, counted over all task loops

    const int world = p.ctx.world;
    // me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    const int me = p.ctx.rank;
    const int rows = ceil_div(p.x_rows, 32);
    const int cols = ceil_div(p.x_cols, 64);
    // for i, m, n in pk.tasks(pk.ranks_from(me), rows, cols, group=2, dynamic=DYNAMIC, cluster=CLUSTER):
    const int tasks = world * rows * cols;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<2>(task, world, rows, cols);
        const int i_i = at[0];
        const int m = at[1];
        const int n = at[2];
        const int i = (me + i_i) % world;
        role.visit(i, m, n);
        // pk.wait(ready, (i, m), 2 * cols)
        wait(role, ready, ready.index(i, m), cols * 2, SITE_READY_WAIT);
        {  // with back.fill() as s:
            shared.back_ring.wait_empty(back_at, role, SITE_BACK_FILL);
            auto& s = shared.back[back_at.stage];
            mbarrier& full = shared.back_ring.full[back_at.stage];
            if (role.issues()) {
                expect_loads(full, s.x);
                // pk.load_async(s.x, full[me], (i, m, n))
                load_expected(s.x, p.full_map, full, i, m * 32, n * 64);
            }
            shared.back_ring.publish_expected(back_at, role);
        }
    }
    shared.back_ring.finish_loads(back_at, shared.launch);
}

// -------------------------------------------------------------------------------------------------- storer
PK_DEVICE void storer(const params& p, shared_map& shared) {
    storer_role role(p.ctx, shared.launch);
    prefetch(p.out_map);
    cursor<2> back_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    const int world = p.ctx.world;
    // me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    const int me = p.ctx.rank;
    const int rows = ceil_div(p.x_rows, 32);
    const int cols = ceil_div(p.x_cols, 64);
    // for i, m, n in pk.tasks(pk.ranks_from(me), rows, cols, group=2, dynamic=DYNAMIC, cluster=CLUSTER):
    const int tasks = world * rows * cols;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<2>(task, world, rows, cols);
        const int i_i = at[0];
        const int m = at[1];
        const int n = at[2];
        const int i = (me + i_i) % world;
        role.visit(i, m, n);
        // with back.drain() as s:
        shared.back_ring.wait_full(back_at, role, SITE_BACK_DRAIN);
        auto& s = shared.back[back_at.stage];
        // pk.store_async(out, s.x, (i, m, n))
        if (role.issues()) store_async(p.out_map, s.x, i, m * 32, n * 64);
        shared.back_ring.release_after_store(back_at);
    }
    shared.back_ring.finish_stores(back_at);
    store_wait<0>();
}

// -------------------------------------------------------------------------------------------- communicator
PK_DEVICE void communicator(const params& p, shared_map& shared) {
    communicator_role role(p.ctx, shared.launch);
    const signal_array<2> ready(p.ready_offset, p.ready_shape_0, p.ready_shape_1);
    int task = blockIdx.x;  // the block's next, counted over all task loops

    const int world = p.ctx.world;
    // me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    const int me = p.ctx.rank;
    const int rows = ceil_div(p.x_rows, 32);
    const int cols = ceil_div(p.x_cols, 64);
    // for m, n in pk.tasks(rows, cols, group=1):
    const int tasks = rows * cols;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<1>(task, rows, cols);
        const int m = at[0];
        const int n = at[1];
        role.visit(m, n);
        // for half in pk.range(2):
        for (int half = 0; half < 2; ++half) {
            // t = pk.load(x, pk.at(m * R + half * (R // 2), n * C), (R // 2, C))
            copied_tile<bf16, 16, 64> t;
            load_copied(t, role, tensor_view<bf16, 2>{p.x, {{p.x_rows, p.x_cols}, {p.x_stride_rows, p.x_stride_cols}}}, 0, 0.0f, {m * 32 + half * 16, n * 64});
            // for r in pk.ranks_from(me + 1, pk.world_size()):
            for (int r_i = 0, r_i_stop = world; r_i < r_i_stop; ++r_i) {
                const int r = (me + r_i + 1) % world;
                // pk.store(full[r], t, pk.at(me, m * R + half * (R // 2), n * C))
                enter(role, SITE_FULL_STORE);
                store_copied(peer_view<bf16, 3>{p.full_peers, {{p.full_depth, p.full_rows, p.full_cols}, {p.full_stride_depth, p.full_stride_rows, p.full_stride_cols}}}, r, t, role, 16, {me, m * 32 + half * 16, n * 64});
            }
        }
        // pk.signal_all(ready, (me, m), 2)
        signal_all(role, ready, ready.index(me, m), 2, SITE_READY_SIGNAL_ALL);
    }
}

// --------------------------------------------------------------------------------------------- main kernel
// Reached by every warp, in each branch: no code stands behind the roles, whose register budgets differ.
PK_DEVICE void main_kernel(const params& p, shared_map& shared) {
    if (threadIdx.x == 0) {
        shared.back_ring.init(/*fill arrivals=*/1, /*drain arrivals=*/1);
    }
    const bool alive = launch_begin(p.ctx, shared.launch);
    const int warp = warp_index();
    if (warp == config::loader_warp) {
        if (alive) loader(p, shared);
        leave();
    } else if (warp == config::storer_warp) {
        if (alive) storer(p, shared);
        leave();
    } else if (warp == config::communicator_warp) {
        if (alive) communicator(p, shared);
        leave();
    } else if (warp == config::launch_warp) {
        launch_role role(p.ctx, shared.launch);
        if (alive) launch_open(role, SITE_ENTRY);
        leave();
        if (launch_close(role, SITE_EXIT)) {
            fill_nan(p.out, p.out_depth, p.out_rows, p.out_cols, p.out_stride_depth, p.out_stride_rows, p.out_stride_cols);
        }
    } else {
        leave();
    }
}

// --------------------------------------------------------------------------------------------------- entry
extern "C" __global__ void __launch_bounds__(config::threads, 1)
pk_gather(const __grid_constant__ params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    main_kernel(p, *reinterpret_cast<shared_map*>(memory));
}
