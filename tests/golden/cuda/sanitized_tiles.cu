// tiles: emitted by pk for sm_90a.
//
//   x: Global   2-d float32
//   c: Parallel 2-d float32
//
//   ring: loader -> storer, 2 stages of 4096 bytes
#define PK_SANITIZE 1
#include "pk/pk.cuh"

using namespace pk;

// -------------------------------------------------------------------------------------------------- config
struct config {
    static constexpr int threads = 128;
    // The last warpgroup: one warp a role, and one that opens and closes the launch.
    static constexpr int loader_warp = 0;
    static constexpr int storer_warp = 1;
    static constexpr int launch_warp = 2;
};

// Places that may wait, numbered as in the table of the host (Source.sites).
enum site : int {
    SITE_RING_FILL = 0,                         // loader: with ring.fill() as s:
    SITE_ROW_OF_X_BOUNDS = 1,                   // loader: pk.load_async(s.x, x, (m, j))
    SITE_COLUMN_OF_X_BOUNDS = 2,                // loader: pk.load_async(s.x, x, (m, j))
    SITE_RING_DRAIN = 3,                        // storer: with ring.drain() as s:
    SITE_THE_RANK_WHOSE_C_IS_MEANT_BOUNDS = 4,  // storer: pk.store_async(c[owner], s.x, (0, j))
    SITE_ROW_OF_C_BOUNDS = 5,                   // storer: pk.store_async(c[owner], s.x, (0, j))
    SITE_COLUMN_OF_C_BOUNDS = 6,                // storer: pk.store_async(c[owner], s.x, (0, j))
    SITE_C_STORE_ASYNC = 7,                     // storer: pk.store_async(c[owner], s.x, (0, j))
    SITE_ENTRY = 8,                             // launch: every rank has begun
    SITE_EXIT = 9,                              // launch: every rank has finished
};

// ---------------------------------------------------------------------------------------------- parameters
struct alignas(64) params {
    tensor_map x_map;              // box (32, 32), swizzle 128
    tensor_map c_maps[max_ranks];  // box (32, 32), swizzle 128, one a rank
    context ctx;
    float* c;                      // this rank's copy
    int x_cols;                    // x.1
    int x_rows;                    // x.0
    int c_rows;                    // c.0
    int c_cols;                    // c.1
    int c_stride_rows;             // c.stride.0
    int c_stride_cols;             // c.stride.1
    int m;                         // m
    int owner;                     // owner
};
static_assert(PK_OFFSETOF(params, x_map) == 0, "pk: params.x_map");
static_assert(PK_OFFSETOF(params, c_maps) == 128, "pk: params.c_maps");
static_assert(PK_OFFSETOF(params, ctx) == 1152, "pk: params.ctx");
static_assert(PK_OFFSETOF(params, c) == 1280, "pk: params.c");
static_assert(PK_OFFSETOF(params, x_cols) == 1288, "pk: params.x_cols");
static_assert(PK_OFFSETOF(params, x_rows) == 1292, "pk: params.x_rows");
static_assert(PK_OFFSETOF(params, c_rows) == 1296, "pk: params.c_rows");
static_assert(PK_OFFSETOF(params, c_cols) == 1300, "pk: params.c_cols");
static_assert(PK_OFFSETOF(params, c_stride_rows) == 1304, "pk: params.c_stride_rows");
static_assert(PK_OFFSETOF(params, c_stride_cols) == 1308, "pk: params.c_stride_cols");
static_assert(PK_OFFSETOF(params, m) == 1312, "pk: params.m");
static_assert(PK_OFFSETOF(params, owner) == 1316, "pk: params.owner");
static_assert(sizeof(params) == 1344, "pk: params");

// ------------------------------------------------------------------------------------------- shared memory
struct shared_map {
    struct ring_stage {
        shared_tile<float, 32, 32> x;
    };
    ring_stage ring[2];
    pipeline<2> ring_ring;
    launch_state launch;
};
static_assert(sizeof(shared_map) <= 9216);

using loader_role = role<1, config::loader_warp>;
using storer_role = role<1, config::storer_warp>;
using launch_role = role<1, config::launch_warp>;

// -------------------------------------------------------------------------------------------------- loader
PK_DEVICE void loader(const params& p, shared_map& shared) {
    loader_role role(p.ctx, shared.launch);
    prefetch(p.x_map);
    cursor<2> ring_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    // for j in pk.tasks(pk.cdiv(x.cols, TILE)):
    const int tasks = ceil_div(p.x_cols, 32);
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<8>(task, ceil_div(p.x_cols, 32));
        const int j = at[0];
        role.visit(j);
        // with ring.fill() as s:
        shared.ring_ring.wait_empty(ring_at, role, SITE_RING_FILL);
        auto& s = shared.ring[ring_at.stage];
        mbarrier& full = shared.ring_ring.full[ring_at.stage];
        // pk.load_async(s.x, x, (m, j))
        check_bounds(role, p.m * 32, p.x_rows, SITE_ROW_OF_X_BOUNDS, -287, 256);
        check_bounds(role, j * 32, p.x_cols, SITE_COLUMN_OF_X_BOUNDS, -287, 256);
        if (role.issues()) load_async(s.x, p.x_map, full, p.m * 32, j * 32);
        shared.ring_ring.publish_loads(ring_at);
    }
    shared.ring_ring.finish_loads(ring_at, shared.launch);
}

// -------------------------------------------------------------------------------------------------- storer
PK_DEVICE void storer(const params& p, shared_map& shared) {
    storer_role role(p.ctx, shared.launch);
    cursor<2> ring_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    const int world = p.ctx.world;
    // for j in pk.tasks(pk.cdiv(x.cols, TILE)):
    const int tasks = ceil_div(p.x_cols, 32);
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<8>(task, ceil_div(p.x_cols, 32));
        const int j = at[0];
        role.visit(j);
        // with ring.drain() as s:
        shared.ring_ring.wait_full(ring_at, role, SITE_RING_DRAIN);
        auto& s = shared.ring[ring_at.stage];
        // pk.store_async(c[owner], s.x, (0, j))
        check_bounds(role, p.owner, world, SITE_THE_RANK_WHOSE_C_IS_MEANT_BOUNDS);
        check_bounds(role, 0, p.c_rows, SITE_ROW_OF_C_BOUNDS, -287, 256);
        check_bounds(role, j * 32, p.c_cols, SITE_COLUMN_OF_C_BOUNDS, -287, 256);
        enter(role, SITE_C_STORE_ASYNC);
        if (role.issues()) store_async(p.c_maps[p.owner], s.x, 0, j * 32);
        shared.ring_ring.release_after_store(ring_at);
    }
    shared.ring_ring.finish_stores(ring_at);
    store_wait<0>();
}

// --------------------------------------------------------------------------------------------- main kernel
// Reached by every warp, in each branch: no code stands behind the roles, whose register budgets differ.
PK_DEVICE void main_kernel(const params& p, shared_map& shared) {
    if (threadIdx.x == 0) {
        shared.ring_ring.init(/*fill arrivals=*/1, /*drain arrivals=*/1);
    }
    const bool alive = launch_begin(p.ctx, shared.launch);
    const int warp = warp_index();
    if (warp == config::loader_warp) {
        if (alive) loader(p, shared);
        leave();
    } else if (warp == config::storer_warp) {
        if (alive) storer(p, shared);
        leave();
    } else if (warp == config::launch_warp) {
        launch_role role(p.ctx, shared.launch);
        if (alive) launch_open(role, SITE_ENTRY);
        leave();
        if (launch_close(role, SITE_EXIT)) {
            fill_nan(p.c, p.c_rows, p.c_cols, p.c_stride_rows, p.c_stride_cols);
        }
    } else {
        leave();
    }
}

// --------------------------------------------------------------------------------------------------- entry
extern "C" __global__ void __launch_bounds__(config::threads, 1)
pk_tiles(const __grid_constant__ params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    poison_shared(memory, 8192);
    main_kernel(p, *reinterpret_cast<shared_map*>(memory));
}
