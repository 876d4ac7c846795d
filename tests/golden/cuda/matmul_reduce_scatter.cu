// matmul_reduce_scatter: emitted by pk for sm_90a.
//
//   a: Global   3-d bfloat16
//   b: Global   2-d bfloat16
//   c: Parallel 2-d bfloat16
//   BM=128 BN=256 BK=64 P=64 STAGES=4
//
//   inputs: loader -> consumer, 4 stages of 49152 bytes
//   output: consumer -> storer, 2 stages of 16384 bytes
#include "pk/pk.cuh"

using namespace pk;

// -------------------------------------------------------------------------------------------------- config
struct config {
    static constexpr int threads = 384;
    static constexpr int consumer_warpgroups = 2;
    // The last warpgroup: one warp a role, and one that opens and closes the launch.
    static constexpr int loader_warp = 8;
    static constexpr int storer_warp = 9;
    static constexpr int launch_warp = 10;
    static constexpr int consumer_registers = 232;
    static constexpr int producer_registers = 40;
};

// Places that may wait, numbered as in the table of the host (Source.sites).
enum site : int {
    SITE_INPUTS_FILL = 0,        // loader: with inputs.fill() as s:
    SITE_INPUTS_DRAIN = 1,       // consumer: with inputs.drain() as s:
    SITE_OUTPUT_FILL = 2,        // consumer: with output.fill() as s:
    SITE_OUTPUT_DRAIN = 3,       // storer: with output.drain() as s:
    SITE_BEGUN_SIGNAL_ALL = 4,   // storer: pk.signal_all(begun, (me, m, n))
    SITE_BEGUN_WAIT = 5,         // storer: pk.wait(begun, (owner, m, n), 1)
    SITE_OUTPUT_DRAIN_2 = 6,     // storer: with output.drain() as s:
    SITE_C_STORE_ADD_ASYNC = 7,  // storer: pk.store_add_async(dst, s.c, (*row, n * (BN // P) + j))
    SITE_ENTRY = 8,              // launch: every rank has begun
    SITE_EXIT = 9,               // launch: every rank has finished
};

// ---------------------------------------------------------------------------------------------- parameters
struct alignas(64) params {
    tensor_map a_map;              // box (1, 128, 64), swizzle 128
    tensor_map b_map;              // box (64, 64), swizzle 128
    tensor_map c_maps[max_ranks];  // box (128, 64), swizzle 128, one a rank
    context ctx;
    bf16* c;                       // this rank's copy
    int c_rows;                    // c.0
    int c_cols;                    // c.1
    int a_cols;                    // a.2
    int c_stride_rows;             // c.stride.0
    int c_stride_cols;             // c.stride.1
    int begun_offset;              // begun.offset
    int begun_shape_0;             // begun.0
    int begun_shape_1;             // begun.1
    int begun_shape_2;             // begun.2
};
static_assert(PK_OFFSETOF(params, a_map) == 0, "pk: params.a_map");
static_assert(PK_OFFSETOF(params, b_map) == 128, "pk: params.b_map");
static_assert(PK_OFFSETOF(params, c_maps) == 256, "pk: params.c_maps");
static_assert(PK_OFFSETOF(params, ctx) == 1280, "pk: params.ctx");
static_assert(PK_OFFSETOF(params, c) == 1408, "pk: params.c");
static_assert(PK_OFFSETOF(params, c_rows) == 1416, "pk: params.c_rows");
static_assert(PK_OFFSETOF(params, c_cols) == 1420, "pk: params.c_cols");
static_assert(PK_OFFSETOF(params, a_cols) == 1424, "pk: params.a_cols");
static_assert(PK_OFFSETOF(params, c_stride_rows) == 1428, "pk: params.c_stride_rows");
static_assert(PK_OFFSETOF(params, c_stride_cols) == 1432, "pk: params.c_stride_cols");
static_assert(PK_OFFSETOF(params, begun_offset) == 1436, "pk: params.begun_offset");
static_assert(PK_OFFSETOF(params, begun_shape_0) == 1440, "pk: params.begun_shape_0");
static_assert(PK_OFFSETOF(params, begun_shape_1) == 1444, "pk: params.begun_shape_1");
static_assert(PK_OFFSETOF(params, begun_shape_2) == 1448, "pk: params.begun_shape_2");
static_assert(sizeof(params) == 1472, "pk: params");

// ------------------------------------------------------------------------------------------- shared memory
struct shared_map {
    struct inputs_stage {
        shared_tile<bf16, 128, 64> a;
        shared_tile<bf16, 64, 256> b;
    };
    struct output_stage {
        shared_tile<bf16, 128, 64> c;
    };
    inputs_stage inputs[4];
    output_stage output[2];
    pipeline<4> inputs_ring;
    pipeline<2> output_ring;
    signal_slot signal_slots[queued_signals];
    launch_state launch;
};
static_assert(sizeof(shared_map) <= 230400);

using loader_role = role<1, config::loader_warp>;
using consumer_role = role<8, 0>;
using storer_role = role<1, config::storer_warp>;
using launch_role = role<1, config::launch_warp>;

// -------------------------------------------------------------------------------------------------- loader
PK_DEVICE void loader(const params& p, shared_map& shared) {
    loader_role role(p.ctx, shared.launch);
    prefetch(p.a_map);
    prefetch(p.b_map);
    cursor<4> inputs_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    const int world = p.ctx.world;
    // me, rows, cols = pk.rank(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    const int me = p.ctx.rank;
    const int rows = ceil_div(p.c_rows, 128);
    const int cols = ceil_div(p.c_cols, 256);
    // for owner, m, n in pk.tasks(pk.ranks_from(me), rows, cols):
    const int tasks = world * rows * cols;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<8>(task, world, rows, cols);
        const int owner_i = at[0];
        const int m = at[1];
        const int n = at[2];
        const int owner = (me + owner_i) % world;
        role.visit(owner, m, n);
        // for k in pk.range(pk.cdiv(a.cols, BK)):
        for (int k = 0, k_stop = ceil_div(p.a_cols, 64); k < k_stop; ++k) {
            // with inputs.fill() as s:
            shared.inputs_ring.wait_empty(inputs_at, role, SITE_INPUTS_FILL);
            auto& s = shared.inputs[inputs_at.stage];
            mbarrier& full = shared.inputs_ring.full[inputs_at.stage];
            if (role.issues()) {
                expect_loads(full, s.a, s.b);
                // pk.load_async(s.a, a, (*row, k))
                load_expected(s.a, p.a_map, full, owner, m * 128, k * 64);
                // pk.load_async(s.b, b, (*lead, k, n))
                load_expected(s.b, p.b_map, full, k * 64, n * 256);
            }
            shared.inputs_ring.publish_expected(inputs_at, role);
        }
    }
    shared.inputs_ring.finish_loads(inputs_at, shared.launch);
}

// ------------------------------------------------------------------------------------------------ consumer
PK_DEVICE void consumer(const params& p, shared_map& shared) {
    consumer_role role(p.ctx, shared.launch);
    cursor<4> inputs_at;
    cursor<2> output_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    const int world = p.ctx.world;
    // me, rows, cols = pk.rank(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    const int rows = ceil_div(p.c_rows, 128);
    const int cols = ceil_div(p.c_cols, 256);
    // for owner, m, n in pk.tasks(pk.ranks_from(me), rows, cols):
    const int tasks = world * rows * cols;
    for (; task < tasks; task += gridDim.x) {
        // acc = pk.zeros((BM, BN), pk.float32)
        accumulator<64, 256> acc;
        fill(acc, 0.0f);
        // for k in pk.range(pk.cdiv(a.cols, BK)):
        for (int k = 0, k_stop = ceil_div(p.a_cols, 64); k < k_stop; ++k) {
            // with inputs.drain() as s:
            shared.inputs_ring.wait_full(inputs_at, role, SITE_INPUTS_DRAIN);
            auto& s = shared.inputs[inputs_at.stage];
            // pk.mma(acc, s.a, s.b)
            mma(acc, s.a, s.b, role.warpgroup());
            shared.inputs_ring.release_after_mma(inputs_at);
        }
        shared.inputs_ring.finish_mma(inputs_at, acc);
        {  // with output.fill() as s:
            shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
            auto& s = shared.output[output_at.stage];
            // pk.store(s.c, acc[:, j * P : (j + 1) * P])
            store(s.c, columns<0, 64>(acc), role.warpgroup());
            shared.output_ring.publish_stores(output_at);
        }
        {  // with output.fill() as s:
            shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
            auto& s = shared.output[output_at.stage];
            // pk.store(s.c, acc[:, j * P : (j + 1) * P])
            store(s.c, columns<64, 128>(acc), role.warpgroup());
            shared.output_ring.publish_stores(output_at);
        }
        {  // with output.fill() as s:
            shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
            auto& s = shared.output[output_at.stage];
            // pk.store(s.c, acc[:, j * P : (j + 1) * P])
            store(s.c, columns<128, 192>(acc), role.warpgroup());
            shared.output_ring.publish_stores(output_at);
        }
        {  // with output.fill() as s:
            shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
            auto& s = shared.output[output_at.stage];
            // pk.store(s.c, acc[:, j * P : (j + 1) * P])
            store(s.c, columns<192, 256>(acc), role.warpgroup());
            shared.output_ring.publish_stores(output_at);
        }
    }
}

// -------------------------------------------------------------------------------------------------- storer
PK_DEVICE void storer(const params& p, shared_map& shared) {
    storer_role role(p.ctx, shared.launch);
    cursor<2> output_at;
    const signal_array<3> begun(p.begun_offset, p.begun_shape_0, p.begun_shape_1, p.begun_shape_2);
    signal_queue<1> deferred(shared.signal_slots);
    int task = blockIdx.x;  // the block's next, counted over all task loops

    const int world = p.ctx.world;
    // me, rows, cols = pk.rank(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    const int me = p.ctx.rank;
    const int rows = ceil_div(p.c_rows, 128);
    const int cols = ceil_div(p.c_cols, 256);
    // for owner, m, n in pk.tasks(pk.ranks_from(me), rows, cols):
    const int tasks = world * rows * cols;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<8>(task, world, rows, cols);
        const int owner_i = at[0];
        const int m = at[1];
        const int n = at[2];
        const int owner = (me + owner_i) % world;
        role.visit(owner, m, n);
        // if owner == me:
        if (owner == me) {
            {  // with output.drain() as s:
                shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN, deferred);
                auto& s = shared.output[output_at.stage];
                // pk.store_async(dst, s.c, (*row, n * (BN // P) + j))
                if (role.issues()) store_async(p.c_maps[me], s.c, m * 128, n * 256);
                shared.output_ring.release_after_store(output_at);
                deferred.committed(role);
            }
            {  // with output.drain() as s:
                shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN, deferred);
                auto& s = shared.output[output_at.stage];
                // pk.store_async(dst, s.c, (*row, n * (BN // P) + j))
                if (role.issues()) store_async(p.c_maps[me], s.c, m * 128, n * 256 + 64);
                shared.output_ring.release_after_store(output_at);
                deferred.committed(role);
            }
            {  // with output.drain() as s:
                shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN, deferred);
                auto& s = shared.output[output_at.stage];
                // pk.store_async(dst, s.c, (*row, n * (BN // P) + j))
                if (role.issues()) store_async(p.c_maps[me], s.c, m * 128, n * 256 + 128);
                shared.output_ring.release_after_store(output_at);
                deferred.committed(role);
            }
            {  // with output.drain() as s:
                shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN, deferred);
                auto& s = shared.output[output_at.stage];
                // pk.store_async(dst, s.c, (*row, n * (BN // P) + j))
                if (role.issues()) store_async(p.c_maps[me], s.c, m * 128, n * 256 + 192);
                shared.output_ring.release_after_store(output_at);
                deferred.committed(role);
            }
            // pk.signal_all(begun, (me, m, n))
            deferred.signal_all(role, begun, begun.index(me, m, n), 1, SITE_BEGUN_SIGNAL_ALL);
        } else {
            // pk.wait(begun, (owner, m, n), 1)
            deferred.flush(role);
            wait(role, begun, begun.index(owner, m, n), 1, SITE_BEGUN_WAIT);
            {  // with output.drain() as s:
                shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN_2, deferred);
                auto& s = shared.output[output_at.stage];
                // pk.store_add_async(dst, s.c, (*row, n * (BN // P) + j))
                deferred.meet(role, SITE_C_STORE_ADD_ASYNC);
                if (role.issues()) store_add_async(p.c_maps[owner], s.c, m * 128, n * 256);
                shared.output_ring.release_after_store(output_at);
                deferred.committed(role);
            }
            {  // with output.drain() as s:
                shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN_2, deferred);
                auto& s = shared.output[output_at.stage];
                // pk.store_add_async(dst, s.c, (*row, n * (BN // P) + j))
                if (role.issues()) store_add_async(p.c_maps[owner], s.c, m * 128, n * 256 + 64);
                shared.output_ring.release_after_store(output_at);
                deferred.committed(role);
            }
            {  // with output.drain() as s:
                shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN_2, deferred);
                auto& s = shared.output[output_at.stage];
                // pk.store_add_async(dst, s.c, (*row, n * (BN // P) + j))
                if (role.issues()) store_add_async(p.c_maps[owner], s.c, m * 128, n * 256 + 128);
                shared.output_ring.release_after_store(output_at);
                deferred.committed(role);
            }
            {  // with output.drain() as s:
                shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN_2, deferred);
                auto& s = shared.output[output_at.stage];
                // pk.store_add_async(dst, s.c, (*row, n * (BN // P) + j))
                if (role.issues()) store_add_async(p.c_maps[owner], s.c, m * 128, n * 256 + 192);
                shared.output_ring.release_after_store(output_at);
                deferred.committed(role);
            }
        }
        shared.output_ring.finish_stores(output_at);
    }
    deferred.flush(role);
    store_wait<0>();
}

// --------------------------------------------------------------------------------------------- main kernel
// Reached by every warp, in each branch: no code stands behind the roles, whose register budgets differ.
PK_DEVICE void main_kernel(const params& p, shared_map& shared) {
    if (threadIdx.x == 0) {
        shared.inputs_ring.init(/*fill arrivals=*/1, /*drain arrivals=*/8);
        shared.output_ring.init(/*fill arrivals=*/8, /*drain arrivals=*/1);
    }
    const bool alive = launch_begin(p.ctx, shared.launch);
    const int warp = warp_index();
    if (warp < 4 * config::consumer_warpgroups) {
        registers_increase<config::consumer_registers>();
        if (alive) consumer(p, shared);
        leave();
    } else {
        registers_decrease<config::producer_registers>();
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
}

// --------------------------------------------------------------------------------------------------- entry
extern "C" __global__ void __launch_bounds__(config::threads, 1)
pk_matmul_reduce_scatter(const __grid_constant__ params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    main_kernel(p, *reinterpret_cast<shared_map*>(memory));
}
