// all_gather_matmul: emitted by pk for sm_90a.
//
//   x: Global   2-d bfloat16
//   b: Global   2-d bfloat16
//   c: Global   3-d bfloat16
//   BM=128 BN=256 BK=64 P=64 STAGES=4 COMM=8 BC=256
//
//   inputs: loader -> consumer, 4 stages of 49152 bytes
//   output: consumer -> storer, 2 stages of 16384 bytes
//   ring: loader -> storer, 3 stages of 65536 bytes
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
    static constexpr int communicator_sms = 8;
};

// Places that may wait, numbered as in the table of the host (Source.sites).
enum site : int {
    SITE_INPUTS_FILL = 0,       // loader: with inputs.fill() as s:
    SITE_READY_WAIT = 1,        // loader: pk.wait(ready, (owner, m), chunks)
    SITE_INPUTS_DRAIN = 2,      // consumer: with inputs.drain() as s:
    SITE_OUTPUT_FILL = 3,       // consumer: with output.fill() as s:
    SITE_OUTPUT_DRAIN = 4,      // storer: with output.drain() as s:
    SITE_RING_FILL = 5,         // communicator loader: with ring.fill() as s:
    SITE_RING_DRAIN = 6,        // communicator storer: with ring.drain() as s:
    SITE_FULL_STORE_ASYNC = 7,  // communicator storer: pk.store_async(full[r], s.x, (me, m, j))
    SITE_READY_SIGNAL = 8,      // communicator storer: pk.signal(ready, (me, m), r)
    SITE_ENTRY = 9,             // launch: every rank has begun
    SITE_EXIT = 10,             // launch: every rank has finished
};

// ---------------------------------------------------------------------------------------------- parameters
struct alignas(64) params {
    tensor_map x_map;                 // box (128, 64), swizzle 128
    tensor_map b_map;                 // box (64, 64), swizzle 128
    tensor_map full_maps[max_ranks];  // box (1, 128, 64), swizzle 128, one a rank
    tensor_map c_map;                 // box (1, 128, 64), swizzle 128
    context ctx;
    bf16* c;                          // this rank's copy
    int x_rows;                       // x.0
    int x_cols;                       // x.1
    int c_cols;                       // c.2
    int c_depth;                      // c.0
    int c_rows;                       // c.1
    int c_stride_depth;               // c.stride.0
    int c_stride_rows;                // c.stride.1
    int c_stride_cols;                // c.stride.2
    int ready_offset;                 // ready.offset
    int ready_shape_0;                // ready.0
    int ready_shape_1;                // ready.1
};
static_assert(PK_OFFSETOF(params, x_map) == 0, "pk: params.x_map");
static_assert(PK_OFFSETOF(params, b_map) == 128, "pk: params.b_map");
static_assert(PK_OFFSETOF(params, full_maps) == 256, "pk: params.full_maps");
static_assert(PK_OFFSETOF(params, c_map) == 1280, "pk: params.c_map");
static_assert(PK_OFFSETOF(params, ctx) == 1408, "pk: params.ctx");
static_assert(PK_OFFSETOF(params, c) == 1536, "pk: params.c");
static_assert(PK_OFFSETOF(params, x_rows) == 1544, "pk: params.x_rows");
static_assert(PK_OFFSETOF(params, x_cols) == 1548, "pk: params.x_cols");
static_assert(PK_OFFSETOF(params, c_cols) == 1552, "pk: params.c_cols");
static_assert(PK_OFFSETOF(params, c_depth) == 1556, "pk: params.c_depth");
static_assert(PK_OFFSETOF(params, c_rows) == 1560, "pk: params.c_rows");
static_assert(PK_OFFSETOF(params, c_stride_depth) == 1564, "pk: params.c_stride_depth");
static_assert(PK_OFFSETOF(params, c_stride_rows) == 1568, "pk: params.c_stride_rows");
static_assert(PK_OFFSETOF(params, c_stride_cols) == 1572, "pk: params.c_stride_cols");
static_assert(PK_OFFSETOF(params, ready_offset) == 1576, "pk: params.ready_offset");
static_assert(PK_OFFSETOF(params, ready_shape_0) == 1580, "pk: params.ready_shape_0");
static_assert(PK_OFFSETOF(params, ready_shape_1) == 1584, "pk: params.ready_shape_1");
static_assert(sizeof(params) == 1600, "pk: params");

// The first blocks of the grid are the communicator's; the others count from 0 again.
PK_DEVICE int communicator_blocks() {
    return max(1, min(config::communicator_sms, int(gridDim.x) / 2));
}

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
    launch_state launch;
};
static_assert(sizeof(shared_map) <= 230400);

struct communicator_shared_map {
    struct ring_stage {
        shared_tile<bf16, 128, 256> x;
    };
    ring_stage ring[3];
    pipeline<3> ring_ring;
    signal_slot signal_slots[queued_signals];
    launch_state launch;
};
static_assert(sizeof(communicator_shared_map) <= 230400);

using loader_role = role<1, config::loader_warp>;
using consumer_role = role<8, 0>;
using storer_role = role<1, config::storer_warp>;
using communicator_loader_role = role<1, config::loader_warp>;
using communicator_storer_role = role<1, config::storer_warp>;
using launch_role = role<1, config::launch_warp>;

// -------------------------------------------------------------------------------------------------- loader
PK_DEVICE void loader(const params& p, shared_map& shared) {
    loader_role role(p.ctx, shared.launch);
    prefetch(p.x_map);
    prefetch(p.b_map);
    cursor<4> inputs_at;
    const signal_array<2> ready(p.ready_offset, p.ready_shape_0, p.ready_shape_1);
    const int blocks = gridDim.x - communicator_blocks();
    int task = blockIdx.x - communicator_blocks();  // the block's next, counted over all task loops

    // me, W, rows, chunks = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BC)
    const int me = p.ctx.rank;
    const int W = p.ctx.world;
    const int rows = ceil_div(p.x_rows, 128);
    const int chunks = ceil_div(p.x_cols, 256);
    // for i, n in pk.tasks(rows * W, pk.cdiv(c.cols, BN)):  # own rows, then row block 0 of every peer, 1, ...
    const int tasks = rows * W * ceil_div(p.c_cols, 256);
    for (; task < tasks; task += blocks) {
        const auto at = coordinate<8>(task, rows * W, ceil_div(p.c_cols, 256));
        const int i = at[0];
        const int n = at[1];
        role.visit(i, n);
        // own = i < rows
        const bool own = i < rows;
        // m = i if own else (i - rows) // (W - 1)
        const int m = own ? i : floor_div(i - rows, W - 1);
        // owner = me if own else (me + 1 + (i - rows) % (W - 1)) % W
        const int owner = own ? me : (me + floor_mod(i - rows, W - 1) + 1) % W;
        // if own:
        if (own) {
            // for k in pk.range(pk.cdiv(a.cols, BK)):
            for (int k = 0, k_stop = ceil_div(p.x_cols, 64); k < k_stop; ++k) {
                // with inputs.fill() as s:
                shared.inputs_ring.wait_empty(inputs_at, role, SITE_INPUTS_FILL);
                auto& s = shared.inputs[inputs_at.stage];
                mbarrier& full = shared.inputs_ring.full[inputs_at.stage];
                if (role.issues()) {
                    expect_loads(full, s.a, s.b);
                    // pk.load_async(s.a, a, (*row, k))
                    load_expected(s.a, p.x_map, full, m * 128, k * 64);
                    // pk.load_async(s.b, b, (*lead, k, n))
                    load_expected(s.b, p.b_map, full, k * 64, n * 256);
                }
                shared.inputs_ring.publish_expected(inputs_at, role);
            }
        } else {
            // pk.wait(ready, (owner, m), chunks)
            wait(role, ready, ready.index(owner, m), chunks, SITE_READY_WAIT);
            // for k in pk.range(pk.cdiv(a.cols, BK)):
            for (int k = 0, k_stop = ceil_div(p.x_cols, 64); k < k_stop; ++k) {
                // with inputs.fill() as s:
                shared.inputs_ring.wait_empty(inputs_at, role, SITE_INPUTS_FILL);
                auto& s = shared.inputs[inputs_at.stage];
                mbarrier& full = shared.inputs_ring.full[inputs_at.stage];
                if (role.issues()) {
                    expect_loads(full, s.a, s.b);
                    // pk.load_async(s.a, a, (*row, k))
                    load_expected(s.a, p.full_maps[me], full, owner, m * 128, k * 64);
                    // pk.load_async(s.b, b, (*lead, k, n))
                    load_expected(s.b, p.b_map, full, k * 64, n * 256);
                }
                shared.inputs_ring.publish_expected(inputs_at, role);
            }
        }
    }
    shared.inputs_ring.finish_loads(inputs_at, shared.launch);
}

// ------------------------------------------------------------------------------------------------ consumer
PK_DEVICE void consumer(const params& p, shared_map& shared) {
    consumer_role role(p.ctx, shared.launch);
    cursor<4> inputs_at;
    cursor<2> output_at;
    const int blocks = gridDim.x - communicator_blocks();
    int task = blockIdx.x - communicator_blocks();  // the block's next, counted over all task loops

    // me, W, rows, chunks = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BC)
    const int W = p.ctx.world;
    const int rows = ceil_div(p.x_rows, 128);
    // for i, n in pk.tasks(rows * W, pk.cdiv(c.cols, BN)):  # own rows, then row block 0 of every peer, 1, ...
    const int tasks = rows * W * ceil_div(p.c_cols, 256);
    for (; task < tasks; task += blocks) {
        // acc = pk.zeros((BM, BN), pk.float32)
        accumulator<64, 256> acc;
        fill(acc, 0.0f);
        // for k in pk.range(pk.cdiv(a.cols, BK)):
        for (int k = 0, k_stop = ceil_div(p.x_cols, 64); k < k_stop; ++k) {
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
    prefetch(p.c_map);
    cursor<2> output_at;
    const int blocks = gridDim.x - communicator_blocks();
    int task = blockIdx.x - communicator_blocks();  // the block's next, counted over all task loops

    // me, W, rows, chunks = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BC)
    const int me = p.ctx.rank;
    const int W = p.ctx.world;
    const int rows = ceil_div(p.x_rows, 128);
    // for i, n in pk.tasks(rows * W, pk.cdiv(c.cols, BN)):  # own rows, then row block 0 of every peer, 1, ...
    const int tasks = rows * W * ceil_div(p.c_cols, 256);
    for (; task < tasks; task += blocks) {
        const auto at = coordinate<8>(task, rows * W, ceil_div(p.c_cols, 256));
        const int i = at[0];
        const int n = at[1];
        role.visit(i, n);
        // own = i < rows
        const bool own = i < rows;
        // m = i if own else (i - rows) // (W - 1)
        const int m = own ? i : floor_div(i - rows, W - 1);
        // owner = me if own else (me + 1 + (i - rows) % (W - 1)) % W
        const int owner = own ? me : (me + floor_mod(i - rows, W - 1) + 1) % W;
        {  // with output.drain() as s:
            shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN);
            auto& s = shared.output[output_at.stage];
            // pk.store_async(dst, s.c, (*row, n * (BN // P) + j))
            if (role.issues()) store_async(p.c_map, s.c, owner, m * 128, n * 256);
            shared.output_ring.release_after_store(output_at);
        }
        {  // with output.drain() as s:
            shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN);
            auto& s = shared.output[output_at.stage];
            // pk.store_async(dst, s.c, (*row, n * (BN // P) + j))
            if (role.issues()) store_async(p.c_map, s.c, owner, m * 128, n * 256 + 64);
            shared.output_ring.release_after_store(output_at);
        }
        {  // with output.drain() as s:
            shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN);
            auto& s = shared.output[output_at.stage];
            // pk.store_async(dst, s.c, (*row, n * (BN // P) + j))
            if (role.issues()) store_async(p.c_map, s.c, owner, m * 128, n * 256 + 128);
            shared.output_ring.release_after_store(output_at);
        }
        {  // with output.drain() as s:
            shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN);
            auto& s = shared.output[output_at.stage];
            // pk.store_async(dst, s.c, (*row, n * (BN // P) + j))
            if (role.issues()) store_async(p.c_map, s.c, owner, m * 128, n * 256 + 192);
            shared.output_ring.release_after_store(output_at);
        }
    }
    shared.output_ring.finish_stores(output_at);
    store_wait<0>();
}

// ------------------------------------------------------------------------------------- communicator loader
PK_DEVICE void communicator_loader(const params& p, communicator_shared_map& shared) {
    communicator_loader_role role(p.ctx, shared.launch);
    prefetch(p.x_map);
    cursor<3> ring_at;
    const int blocks = communicator_blocks();
    int task = blockIdx.x;  // the block's next, counted over all task loops

    // me, W, rows, chunks = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BC)
    const int rows = ceil_div(p.x_rows, 128);
    const int chunks = ceil_div(p.x_cols, 256);
    // for m, j in pk.tasks(rows, chunks, group=1):
    const int tasks = rows * chunks;
    for (; task < tasks; task += blocks) {
        const auto at = coordinate<1>(task, rows, chunks);
        const int m = at[0];
        const int j = at[1];
        role.visit(m, j);
        // with ring.fill() as s:
        shared.ring_ring.wait_empty(ring_at, role, SITE_RING_FILL);
        auto& s = shared.ring[ring_at.stage];
        mbarrier& full = shared.ring_ring.full[ring_at.stage];
        if (role.issues()) {
            expect_loads(full, s.x);
            // pk.load_async(s.x, x, (m, j))
            load_expected(s.x, p.x_map, full, m * 128, j * 256);
        }
        shared.ring_ring.publish_expected(ring_at, role);
    }
    shared.ring_ring.finish_loads(ring_at, shared.launch);
}

// ------------------------------------------------------------------------------------- communicator storer
PK_DEVICE void communicator_storer(const params& p, communicator_shared_map& shared) {
    communicator_storer_role role(p.ctx, shared.launch);
    cursor<3> ring_at;
    const signal_array<2> ready(p.ready_offset, p.ready_shape_0, p.ready_shape_1);
    const int blocks = communicator_blocks();
    signal_queue<2> deferred(shared.signal_slots);
    int task = blockIdx.x;  // the block's next, counted over all task loops

    // me, W, rows, chunks = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BC)
    const int me = p.ctx.rank;
    const int W = p.ctx.world;
    const int rows = ceil_div(p.x_rows, 128);
    const int chunks = ceil_div(p.x_cols, 256);
    // for m, j in pk.tasks(rows, chunks, group=1):
    const int tasks = rows * chunks;
    for (; task < tasks; task += blocks) {
        const auto at = coordinate<1>(task, rows, chunks);
        const int m = at[0];
        const int j = at[1];
        role.visit(m, j);
        {  // with ring.drain() as s:
            shared.ring_ring.wait_full(ring_at, role, SITE_RING_DRAIN, deferred);
            auto& s = shared.ring[ring_at.stage];
            // for r in pk.ranks_from(me + 1, W - 1):
            for (int r_i = 0, r_i_stop = W - 1; r_i < r_i_stop; ++r_i) {
                const int r = (me + r_i + 1) % W;
                // pk.store_async(full[r], s.x, (me, m, j))
                deferred.meet(role, SITE_FULL_STORE_ASYNC);
                if (role.issues()) store_async(p.full_maps[r], s.x, me, m * 128, j * 256);
            }
            shared.ring_ring.release_after_store(ring_at);
            deferred.committed(role);
        }
        // for r in pk.ranks_from(me + 1, W - 1):
        for (int r_i = 0, r_i_stop = W - 1; r_i < r_i_stop; ++r_i) {
            const int r = (me + r_i + 1) % W;
            // pk.signal(ready, (me, m), r)
            deferred.signal(role, ready, ready.index(me, m), r, 1, SITE_READY_SIGNAL);
        }
    }
    shared.ring_ring.finish_stores(ring_at);
    deferred.flush(role);
    store_wait<0>();
}

// --------------------------------------------------------------------------------------------- main kernel
PK_DEVICE void communicator_kernel(const params& p, communicator_shared_map& shared) {
    if (threadIdx.x == 0) {
        shared.ring_ring.init(/*fill arrivals=*/1, /*drain arrivals=*/1);
    }
    const bool alive = launch_begin(p.ctx, shared.launch);
    const int warp = warp_index();
    if (warp == config::loader_warp) {
        if (alive) communicator_loader(p, shared);
        leave();
    } else if (warp == config::storer_warp) {
        if (alive) communicator_storer(p, shared);
        leave();
    } else if (warp == config::launch_warp) {
        launch_role role(p.ctx, shared.launch);
        if (alive) launch_open(role, SITE_ENTRY);
        leave();
        if (launch_close(role, SITE_EXIT)) {
            fill_nan(p.c, p.c_depth, p.c_rows, p.c_cols, p.c_stride_depth, p.c_stride_rows, p.c_stride_cols);
        }
    } else {
        leave();
    }
}

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
                fill_nan(p.c, p.c_depth, p.c_rows, p.c_cols, p.c_stride_depth, p.c_stride_rows, p.c_stride_cols);
            }
        } else {
            leave();
        }
    }
}

// --------------------------------------------------------------------------------------------------- entry
extern "C" __global__ void __launch_bounds__(config::threads, 1)
pk_all_gather_matmul(const __grid_constant__ params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    if (int(blockIdx.x) < communicator_blocks()) {
        communicator_kernel(p, *reinterpret_cast<communicator_shared_map*>(memory));
    } else {
        main_kernel(p, *reinterpret_cast<shared_map*>(memory));
    }
}
