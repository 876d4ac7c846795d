// rows: emitted by pk for sm_90a.
//
//   x: Global   2-d float32
//   which: Global   1-d int32
//   c: Global   2-d float32
//
//   ring: loader -> storer, 2 stages of 5120 bytes
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
    SITE_ELEMENT_OF_WHICH_BOUNDS = 0,  // loader: entry = pk.load(which, i, (TILE,), other=-1)
    SITE_RING_FILL = 1,                // loader: with ring.fill() as s:
    SITE_ROW_OF_X_BOUNDS = 2,          // loader: pk.gather_async(s.x, x, entry, j)
    SITE_COLUMN_OF_X_BOUNDS = 3,       // loader: pk.gather_async(s.x, x, entry, j)
    SITE_RING_DRAIN = 4,               // storer: with ring.drain() as s:
    SITE_ROW_OF_C_BOUNDS = 5,          // storer: pk.scatter_async(c, s.x, i * TILE + pk.iota((TILE,)), j)
    SITE_COLUMN_OF_C_BOUNDS = 6,       // storer: pk.scatter_async(c, s.x, i * TILE + pk.iota((TILE,)), j)
    SITE_ENTRY = 7,                    // launch: every rank has begun
    SITE_EXIT = 8,                     // launch: every rank has finished
};

// ---------------------------------------------------------------------------------------------- parameters
struct alignas(64) params {
    context ctx;
    float* c;               // this rank's copy
    int* which;             // this rank's copy
    float* x;               // this rank's copy
    int which_cols;         // which.0
    int x_cols;             // x.1
    int x_rows;             // x.0
    int c_rows;             // c.0
    int c_cols;             // c.1
    int c_stride_rows;      // c.stride.0
    int c_stride_cols;      // c.stride.1
    int which_stride_cols;  // which.stride.0
    int x_stride_rows;      // x.stride.0
    int x_stride_cols;      // x.stride.1
};
static_assert(PK_OFFSETOF(params, ctx) == 0, "pk: params.ctx");
static_assert(PK_OFFSETOF(params, c) == 128, "pk: params.c");
static_assert(PK_OFFSETOF(params, which) == 136, "pk: params.which");
static_assert(PK_OFFSETOF(params, x) == 144, "pk: params.x");
static_assert(PK_OFFSETOF(params, which_cols) == 152, "pk: params.which_cols");
static_assert(PK_OFFSETOF(params, x_cols) == 156, "pk: params.x_cols");
static_assert(PK_OFFSETOF(params, x_rows) == 160, "pk: params.x_rows");
static_assert(PK_OFFSETOF(params, c_rows) == 164, "pk: params.c_rows");
static_assert(PK_OFFSETOF(params, c_cols) == 168, "pk: params.c_cols");
static_assert(PK_OFFSETOF(params, c_stride_rows) == 172, "pk: params.c_stride_rows");
static_assert(PK_OFFSETOF(params, c_stride_cols) == 176, "pk: params.c_stride_cols");
static_assert(PK_OFFSETOF(params, which_stride_cols) == 180, "pk: params.which_stride_cols");
static_assert(PK_OFFSETOF(params, x_stride_rows) == 184, "pk: params.x_stride_rows");
static_assert(PK_OFFSETOF(params, x_stride_cols) == 188, "pk: params.x_stride_cols");
static_assert(sizeof(params) == 192, "pk: params");

// ------------------------------------------------------------------------------------------- shared memory
struct shared_map {
    struct ring_stage {
        shared_tile<float, 32, 32, true> x;  // copied row by row
    };
    ring_stage ring[2];
    pipeline<2> ring_ring;
    launch_state launch;
};
static_assert(sizeof(shared_map) <= 11264);

using loader_role = role<1, config::loader_warp>;
using storer_role = role<1, config::storer_warp>;
using launch_role = role<1, config::launch_warp>;

// -------------------------------------------------------------------------------------------------- loader
PK_DEVICE void loader(const params& p, shared_map& shared) {
    loader_role role(p.ctx, shared.launch);
    cursor<2> ring_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    // for i, j in pk.tasks(pk.cdiv(which.shape[0], TILE), pk.cdiv(x.cols, TILE)):
    const int tasks = ceil_div(p.which_cols, 32) * ceil_div(p.x_cols, 32);
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<8>(task, ceil_div(p.which_cols, 32), ceil_div(p.x_cols, 32));
        const int i = at[0];
        const int j = at[1];
        role.visit(i, j);
        // entry = pk.load(which, i, (TILE,), other=-1)
        check_bounds(role, i * 32 + iota<32>(), p.which_cols, SITE_ELEMENT_OF_WHICH_BOUNDS, -63, 32);
        const index_vector<int, 32> entry = load_elements<32>(tensor_view<int, 1>{p.which, {{p.which_cols}, {p.which_stride_cols}}}, p.ctx.world, -1, 0, i * 32 + iota<32>());
        {  // with ring.fill() as s:
            shared.ring_ring.wait_empty(ring_at, role, SITE_RING_FILL);
            auto& s = shared.ring[ring_at.stage];
            mbarrier& full = shared.ring_ring.full[ring_at.stage];
            // pk.gather_async(s.x, x, entry, j)
            check_bounds(role, entry, p.x_rows, SITE_ROW_OF_X_BOUNDS, -63, 32);
            check_bounds(role, j * 32, p.x_cols, SITE_COLUMN_OF_X_BOUNDS, -287, 256);
            gather_async(role, s.x, full, tensor_view<float, 2>{p.x, {{p.x_rows, p.x_cols}, {p.x_stride_rows, p.x_stride_cols}}}, 0, entry, j * 32);
            shared.ring_ring.publish_loads(ring_at);
        }
    }
    shared.ring_ring.finish_loads(ring_at, shared.launch);
}

// -------------------------------------------------------------------------------------------------- storer
PK_DEVICE void storer(const params& p, shared_map& shared) {
    storer_role role(p.ctx, shared.launch);
    cursor<2> ring_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    // for i, j in pk.tasks(pk.cdiv(which.shape[0], TILE), pk.cdiv(x.cols, TILE)):
    const int tasks = ceil_div(p.which_cols, 32) * ceil_div(p.x_cols, 32);
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<8>(task, ceil_div(p.which_cols, 32), ceil_div(p.x_cols, 32));
        const int i = at[0];
        const int j = at[1];
        role.visit(i, j);
        // with ring.drain() as s:
        shared.ring_ring.wait_full(ring_at, role, SITE_RING_DRAIN);
        auto& s = shared.ring[ring_at.stage];
        // pk.scatter_async(c, s.x, i * TILE + pk.iota((TILE,)), j)
        check_bounds(role, i * 32 + iota<32>(), p.c_rows, SITE_ROW_OF_C_BOUNDS, -63, 32);
        check_bounds(role, j * 32, p.c_cols, SITE_COLUMN_OF_C_BOUNDS, -287, 256);
        scatter_async(role, tensor_view<float, 2>{p.c, {{p.c_rows, p.c_cols}, {p.c_stride_rows, p.c_stride_cols}}}, 0, i * 32 + iota<32>(), j * 32, s.x);
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
pk_rows(const __grid_constant__ params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    poison_shared(memory, 10240);
    main_kernel(p, *reinterpret_cast<shared_map*>(memory));
}
