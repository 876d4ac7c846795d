// matmul: emitted by pk for sm_90a.
//
//   a: Global   2-d bfloat16
//   b: Global   2-d bfloat16
//   c: Global   2-d bfloat16
//   BM=128 BN=256 BK=64 P=64 STAGES=4 OUTS=2 WARPGROUPS=2 PINGPONG=False CLUSTER=1 BY_COLS=False GROUP=0 SPLIT=1 A_T=False B_T=False C_T=False ACTIVATION=none
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
    SITE_INPUTS_FILL = 0,     // loader: with inputs.fill() as s:
    SITE_INPUTS_DRAIN = 1,    // consumer: with inputs.drain() as s:
    SITE_INPUTS_DRAIN_2 = 2,  // consumer: with inputs.drain() as s:
    SITE_OUTPUT_FILL = 3,     // consumer: with output.fill() as s:
    SITE_OUTPUT_DRAIN = 4,    // storer: with output.drain() as s:
    SITE_ENTRY = 5,           // launch: every rank has begun
    SITE_EXIT = 6,            // launch: every rank has finished
};

// ---------------------------------------------------------------------------------------------- parameters
struct alignas(64) params {
    tensor_map a_map;   // box (128, 64), swizzle 128
    tensor_map b_map;   // box (64, 64), swizzle 128
    tensor_map c_map;   // box (128, 64), swizzle 128
    context ctx;
    bf16* c;            // this rank's copy
    int c_rows;         // c.0
    int c_cols;         // c.1
    int a_cols;         // a.1
    int c_stride_rows;  // c.stride.0
    int c_stride_cols;  // c.stride.1
};
static_assert(PK_OFFSETOF(params, a_map) == 0, "pk: params.a_map");
static_assert(PK_OFFSETOF(params, b_map) == 128, "pk: params.b_map");
static_assert(PK_OFFSETOF(params, c_map) == 256, "pk: params.c_map");
static_assert(PK_OFFSETOF(params, ctx) == 384, "pk: params.ctx");
static_assert(PK_OFFSETOF(params, c) == 512, "pk: params.c");
static_assert(PK_OFFSETOF(params, c_rows) == 520, "pk: params.c_rows");
static_assert(PK_OFFSETOF(params, c_cols) == 524, "pk: params.c_cols");
static_assert(PK_OFFSETOF(params, a_cols) == 528, "pk: params.a_cols");
static_assert(PK_OFFSETOF(params, c_stride_rows) == 532, "pk: params.c_stride_rows");
static_assert(PK_OFFSETOF(params, c_stride_cols) == 536, "pk: params.c_stride_cols");
static_assert(sizeof(params) == 576, "pk: params");

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

    // M, N, K = c.cols if C_T else c.rows, c.rows if C_T else c.cols, a.rows if A_T else a.cols
    const int M = p.c_rows;
    const int N = p.c_cols;
    const int K = p.a_cols;
    // rows, cols, steps = pk.cdiv(M, BM), pk.cdiv(N, BN), pk.cdiv(K, BK)
    const int rows = ceil_div(M, 128);
    const int cols = ceil_div(N, 256);
    const int steps = ceil_div(K, 64);
    // outer, inner = (cols, rows) if BY_COLS else (rows, cols)
    const int outer = rows;
    const int inner = cols;
    // for part, x, y in pk.tasks(SPLIT, outer, inner, group=GROUP or 8 * CLUSTER, cluster=CLUSTER):
    const int tasks = 1 * outer * inner;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<8>(task, 1, outer, inner);
        const int part = at[0];
        const int x = at[1];
        const int y = at[2];
        role.visit(part, x, y);
        // m, n = (y, x) if BY_COLS else (x, y)
        const int m = x;
        const int n = y;
        // first, stop = part * steps // SPLIT, (part + 1) * steps // SPLIT
        const int first = part * steps;
        const int stop = (part + 1) * steps;
        // for k in pk.range(first, stop):
        for (int k = first; k < stop; ++k) {
            // with inputs.fill() as s:
            shared.inputs_ring.wait_empty(inputs_at, role, SITE_INPUTS_FILL);
            auto& s = shared.inputs[inputs_at.stage];
            mbarrier& full = shared.inputs_ring.full[inputs_at.stage];
            if (role.issues()) {
                expect_loads(full, s.a, s.b);
                // pk.load_async(s.a, a, (k, m) if A_T else (m, k))
                load_expected(s.a, p.a_map, full, m * 128, k * 64);
                // pk.load_async(s.b, b, (n, k) if B_T else (k, n))
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

    // M, N, K = c.cols if C_T else c.rows, c.rows if C_T else c.cols, a.rows if A_T else a.cols
    const int M = p.c_rows;
    const int N = p.c_cols;
    const int K = p.a_cols;
    // rows, cols, steps = pk.cdiv(M, BM), pk.cdiv(N, BN), pk.cdiv(K, BK)
    const int rows = ceil_div(M, 128);
    const int cols = ceil_div(N, 256);
    const int steps = ceil_div(K, 64);
    // outer, inner = (cols, rows) if BY_COLS else (rows, cols)
    const int outer = rows;
    const int inner = cols;
    // for part, x, y in pk.tasks(SPLIT, outer, inner, group=GROUP or 8 * CLUSTER, cluster=CLUSTER):
    const int tasks = 1 * outer * inner;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<8>(task, 1, outer, inner);
        const int part = at[0];
        // first, stop = part * steps // SPLIT, (part + 1) * steps // SPLIT
        const int first = part * steps;
        const int stop = (part + 1) * steps;
        // acc = pk.zeros((BM, BN), pk.float32)
        accumulator<64, 256> acc;
        zero(acc);
        {  // with inputs.drain() as s:
            shared.inputs_ring.wait_full(inputs_at, role, SITE_INPUTS_DRAIN);
            auto& s = shared.inputs[inputs_at.stage];
            // pk.mma(acc, s.a.T if A_T else s.a, s.b.T if B_T else s.b)
            mma(acc, s.a, s.b, role.warpgroup());
            shared.inputs_ring.release_after_mma(inputs_at);
        }
        // for k in pk.range(first + 1 if SOME else first, stop):
        for (int k = first + 1; k < stop; ++k) {
            // with inputs.drain() as s:
            shared.inputs_ring.wait_full(inputs_at, role, SITE_INPUTS_DRAIN_2);
            auto& s = shared.inputs[inputs_at.stage];
            // pk.mma(acc, s.a.T if A_T else s.a, s.b.T if B_T else s.b)
            mma(acc, s.a, s.b, role.warpgroup());
            shared.inputs_ring.release_after_mma(inputs_at);
        }
        shared.inputs_ring.finish_mma(inputs_at, acc);
        // r = acc[:, start:stop]
        register_tile<float, 64, 64> r = columns<0, 64>(acc);
        {  // with output.fill() as s:
            shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
            auto& s = shared.output[output_at.stage];
            // pk.store(s.c.T if C_T else s.c, r)
            store(s.c, r, role.warpgroup());
            shared.output_ring.publish_stores(output_at);
        }
        // r = acc[:, start:stop]
        r = columns<64, 128>(acc);
        {  // with output.fill() as s:
            shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
            auto& s = shared.output[output_at.stage];
            // pk.store(s.c.T if C_T else s.c, r)
            store(s.c, r, role.warpgroup());
            shared.output_ring.publish_stores(output_at);
        }
        // r = acc[:, start:stop]
        r = columns<128, 192>(acc);
        {  // with output.fill() as s:
            shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
            auto& s = shared.output[output_at.stage];
            // pk.store(s.c.T if C_T else s.c, r)
            store(s.c, r, role.warpgroup());
            shared.output_ring.publish_stores(output_at);
        }
        // r = acc[:, start:stop]
        r = columns<192, 256>(acc);
        {  // with output.fill() as s:
            shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
            auto& s = shared.output[output_at.stage];
            // pk.store(s.c.T if C_T else s.c, r)
            store(s.c, r, role.warpgroup());
            shared.output_ring.publish_stores(output_at);
        }
    }
}

// -------------------------------------------------------------------------------------------------- storer
PK_DEVICE void storer(const params& p, shared_map& shared) {
    storer_role role(p.ctx, shared.launch);
    prefetch(p.c_map);
    cursor<2> output_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    // M, N, K = c.cols if C_T else c.rows, c.rows if C_T else c.cols, a.rows if A_T else a.cols
    const int M = p.c_rows;
    const int N = p.c_cols;
    // rows, cols, steps = pk.cdiv(M, BM), pk.cdiv(N, BN), pk.cdiv(K, BK)
    const int rows = ceil_div(M, 128);
    const int cols = ceil_div(N, 256);
    // outer, inner = (cols, rows) if BY_COLS else (rows, cols)
    const int outer = rows;
    const int inner = cols;
    // for part, x, y in pk.tasks(SPLIT, outer, inner, group=GROUP or 8 * CLUSTER, cluster=CLUSTER):
    const int tasks = 1 * outer * inner;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<8>(task, 1, outer, inner);
        const int x = at[1];
        const int y = at[2];
        // m, n = (y, x) if BY_COLS else (x, y)
        const int m = x;
        const int n = y;
        {  // with output.drain() as s:
            shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN);
            auto& s = shared.output[output_at.stage];
            // pk.store_async(dst, s.c, (n * (BN // P) + j, m) if C_T else (m, n * (BN // P) + j))
            if (role.issues()) store_async(p.c_map, s.c, m * 128, n * 256);
            shared.output_ring.release_after_store(output_at);
        }
        {  // with output.drain() as s:
            shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN);
            auto& s = shared.output[output_at.stage];
            // pk.store_async(dst, s.c, (n * (BN // P) + j, m) if C_T else (m, n * (BN // P) + j))
            if (role.issues()) store_async(p.c_map, s.c, m * 128, n * 256 + 64);
            shared.output_ring.release_after_store(output_at);
        }
        {  // with output.drain() as s:
            shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN);
            auto& s = shared.output[output_at.stage];
            // pk.store_async(dst, s.c, (n * (BN // P) + j, m) if C_T else (m, n * (BN // P) + j))
            if (role.issues()) store_async(p.c_map, s.c, m * 128, n * 256 + 128);
            shared.output_ring.release_after_store(output_at);
        }
        {  // with output.drain() as s:
            shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN);
            auto& s = shared.output[output_at.stage];
            // pk.store_async(dst, s.c, (n * (BN // P) + j, m) if C_T else (m, n * (BN // P) + j))
            if (role.issues()) store_async(p.c_map, s.c, m * 128, n * 256 + 192);
            shared.output_ring.release_after_store(output_at);
        }
    }
    shared.output_ring.finish_stores(output_at);
    store_wait<0>();
}

// --------------------------------------------------------------------------------------------- main kernel
// Reached by every warp, in each branch: no code stands behind the roles, whose register budgets differ.
PK_DEVICE void main_kernel(const params& p, shared_map& shared) {
    if (threadIdx.x == 0) {
        shared.inputs_ring.init(/*fill arrivals=*/1, /*drain arrivals=*/8);
        shared.output_ring.init(/*fill arrivals=*/8, /*drain arrivals=*/1);
    }
    const bool alive = local_begin(shared.launch);
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
            leave();
            if (local_close(role)) {
                fill_nan(p.c, p.c_rows, p.c_cols, p.c_stride_rows, p.c_stride_cols);
            }
        } else {
            leave();
        }
    }
}

// --------------------------------------------------------------------------------------------------- entry
extern "C" __global__ void __launch_bounds__(config::threads, 1)
pk_matmul(const __grid_constant__ params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    main_kernel(p, *reinterpret_cast<shared_map*>(memory));
}
