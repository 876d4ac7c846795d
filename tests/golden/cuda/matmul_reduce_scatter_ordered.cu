// matmul_reduce_scatter_ordered: emitted by pk for sm_90a.
//
//   a: Global   3-d bfloat16
//   b: Global   2-d bfloat16
//   c: Global   2-d bfloat16
//   BM=128 BN=256 BK=64 P=64 STAGES=3 OUTS=2 WARPGROUPS=2 PINGPONG=False GROUP=8 LAG=80 STEPS=66 SHIFT=1 PARTS=3 AHEAD=2 IN_PLACE=False B_T=False TURNED=False ACTIVATION=none
//
//   inputs: loader -> consumer, 3 stages of 49152 bytes
//   output: consumer -> storer, 2 stages of 16384 bytes
//   parts: storer -> consumer, 3 stages of 16384 bytes
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
    static constexpr int consumer_registers = 224;
    static constexpr int producer_registers = 56;
};

// Places that may wait, numbered as in the table of the host (Source.sites).
enum site : int {
    SITE_INPUTS_FILL = 0,       // loader: with inputs.fill() as s:
    SITE_INPUTS_DRAIN = 1,      // consumer: with inputs.drain() as s:
    SITE_PARTS_DRAIN = 2,       // consumer: with parts.drain() as s:
    SITE_OUTPUT_FILL = 3,       // consumer: with output.fill() as s:
    SITE_ARRIVED_WAIT = 4,      // storer: pk.wait(arrived, (m, n), W - 1)
    SITE_PARTS_FILL = 5,        // storer: with parts.fill() as s:
    SITE_PART_LOAD_ASYNC = 6,   // storer: pk.load_async(s.c, part[r], at)
    SITE_OUTPUT_DRAIN = 7,      // storer: with output.drain() as s:
    SITE_OUTPUT_DRAIN_2 = 8,    // storer: with output.drain() as s:
    SITE_PART_STORE_ASYNC = 9,  // storer: pk.store_async(dst, s.c, piece_at(row, n, j, SHAPE))
    SITE_ARRIVED_SIGNAL = 10,   // storer: pk.signal(arrived, (m, n), owner)
    SITE_ENTRY = 11,            // launch: every rank has begun
    SITE_EXIT = 12,             // launch: every rank has finished
};

// ---------------------------------------------------------------------------------------------- parameters
struct alignas(64) params {
    tensor_map a_map;                 // box (1, 128, 64), swizzle 128
    tensor_map b_map;                 // box (64, 64), swizzle 128
    tensor_map part_maps[max_ranks];  // box (1, 128, 64), swizzle 128, one a rank
    tensor_map c_map;                 // box (128, 64), swizzle 128
    context ctx;
    bf16* c;                          // this rank's copy
    int c_rows;                       // c.0
    int c_cols;                       // c.1
    int a_cols;                       // a.2
    int c_stride_rows;                // c.stride.0
    int c_stride_cols;                // c.stride.1
    int arrived_offset;               // arrived.offset
    int arrived_shape_0;              // arrived.0
    int arrived_shape_1;              // arrived.1
};
static_assert(PK_OFFSETOF(params, a_map) == 0, "pk: params.a_map");
static_assert(PK_OFFSETOF(params, b_map) == 128, "pk: params.b_map");
static_assert(PK_OFFSETOF(params, part_maps) == 256, "pk: params.part_maps");
static_assert(PK_OFFSETOF(params, c_map) == 1280, "pk: params.c_map");
static_assert(PK_OFFSETOF(params, ctx) == 1408, "pk: params.ctx");
static_assert(PK_OFFSETOF(params, c) == 1536, "pk: params.c");
static_assert(PK_OFFSETOF(params, c_rows) == 1544, "pk: params.c_rows");
static_assert(PK_OFFSETOF(params, c_cols) == 1548, "pk: params.c_cols");
static_assert(PK_OFFSETOF(params, a_cols) == 1552, "pk: params.a_cols");
static_assert(PK_OFFSETOF(params, c_stride_rows) == 1556, "pk: params.c_stride_rows");
static_assert(PK_OFFSETOF(params, c_stride_cols) == 1560, "pk: params.c_stride_cols");
static_assert(PK_OFFSETOF(params, arrived_offset) == 1564, "pk: params.arrived_offset");
static_assert(PK_OFFSETOF(params, arrived_shape_0) == 1568, "pk: params.arrived_shape_0");
static_assert(PK_OFFSETOF(params, arrived_shape_1) == 1572, "pk: params.arrived_shape_1");
static_assert(sizeof(params) == 1600, "pk: params");

// ------------------------------------------------------------------------------------------- shared memory
struct shared_map {
    struct inputs_stage {
        shared_tile<bf16, 128, 64> a;
        shared_tile<bf16, 64, 256> b;
    };
    struct output_stage {
        shared_tile<bf16, 128, 64> c;
    };
    struct parts_stage {
        shared_tile<bf16, 128, 64> c;
    };
    inputs_stage inputs[3];
    output_stage output[2];
    parts_stage parts[3];
    pipeline<3> inputs_ring;
    pipeline<2> output_ring;
    pipeline<3> parts_ring;
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
    cursor<3> inputs_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    // me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    const int me = p.ctx.rank;
    const int W = p.ctx.world;
    const int rows = ceil_div(p.c_rows, 128);
    const int cols = ceil_div(p.c_cols, 256);
    // lag = pk.min(LAG, rows * cols)
    const int lag = min(80, rows * cols);
    // for step, turn in pk.tasks(rows * cols + lag, W, group=1):
    const int tasks = (rows * cols + lag) * W;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<1>(task, rows * cols + lag, W);
        const int step = at[0];
        const int turn = at[1];
        role.visit(step, turn);
        // owner = owner_of(step, turn, STEPS, SHIFT)
        const int owner = (me + turn + step / 66 + 1) % W;
        // t = step - lag if owner == me else step
        const int t = owner == me ? step - lag : step;
        // if t >= 0 and t < rows * cols:
        if (t >= 0 && t < rows * cols) {
            // group = t // (G * cols)
            const int group = floor_div(t, cols * 8);
            // height, i = pk.min(G, rows - group * G), t - group * (G * cols)
            const int height = min(8, rows - group * 8);
            const int i = t - group * (cols * 8);
            // m, n = place(t, rows, cols, GROUP)
            const int m = group * 8 + floor_mod(i, height);
            const int n = floor_div(i, height);
            // for k in pk.range(pk.cdiv(K, BK)):
            for (int k = 0, k_stop = ceil_div(p.a_cols, 64); k < k_stop; ++k) {
                // with inputs.fill() as s:
                shared.inputs_ring.wait_empty(inputs_at, role, SITE_INPUTS_FILL);
                auto& s = shared.inputs[inputs_at.stage];
                mbarrier& full = shared.inputs_ring.full[inputs_at.stage];
                if (role.issues()) {
                    expect_loads(full, s.a, s.b);
                    // pk.load_async(s.b if TURNED else s.a, a, (*row, k))
                    load_expected(s.a, p.a_map, full, owner, m * 128, k * 64);
                    // pk.load_async(s.a if TURNED else s.b, b, (n, k) if B_T else (k, n))
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
    cursor<3> inputs_at;
    cursor<3> parts_at;
    cursor<2> output_at;
    int task = blockIdx.x;  // the block's next, counted over all task loops

    // me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    const int me = p.ctx.rank;
    const int W = p.ctx.world;
    const int rows = ceil_div(p.c_rows, 128);
    const int cols = ceil_div(p.c_cols, 256);
    // lag = pk.min(LAG, rows * cols)
    const int lag = min(80, rows * cols);
    // for step, turn in pk.tasks(rows * cols + lag, W, group=1):
    const int tasks = (rows * cols + lag) * W;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<1>(task, rows * cols + lag, W);
        const int step = at[0];
        const int turn = at[1];
        role.visit(step, turn);
        // owner = owner_of(step, turn, STEPS, SHIFT)
        const int owner = (me + turn + step / 66 + 1) % W;
        // t = step - lag if owner == me else step
        const int t = owner == me ? step - lag : step;
        // if t >= 0 and t < rows * cols:
        if (t >= 0 && t < rows * cols) {
            // me, W = pk.rank(), pk.world_size()
            const int me_1 = me;
            // last = owner == me
            const bool last = owner == me_1;
            // return accumulate_part(inputs, 0, pk.cdiv(K, BK), BM, BN, False, B_T)
            const int stop = ceil_div(p.a_cols, 64);
            // acc = pk.zeros((BM, BN), pk.float32)
            accumulator<64, 256> acc;
            fill(acc, 0.0f);
            // for k in pk.range(first + 1 if SOME else first, stop):
            for (int k = 0; k < stop; ++k) {
                // with inputs.drain() as s:
                shared.inputs_ring.wait_full(inputs_at, role, SITE_INPUTS_DRAIN);
                auto& s = shared.inputs[inputs_at.stage];
                // pk.mma(acc, s.a.T if A_T else s.a, s.b.T if B_T else s.b)
                mma(acc, s.a, s.b, role.warpgroup());
                shared.inputs_ring.release_after_mma(inputs_at);
            }
            shared.inputs_ring.finish_mma(inputs_at, acc);
            // r = acc[:, j * P : (j + 1) * P]
            register_tile<float, 64, 64> r = columns<0, 64>(acc);
            // if last:
            if (last) {
                // for _ in pk.range(pk.world_size() - 1):
                for (int i = 0, i_stop = W - 1; i < i_stop; ++i) {
                    // with parts.drain() as s:
                    shared.parts_ring.wait_full(parts_at, role, SITE_PARTS_DRAIN);
                    auto& s = shared.parts[parts_at.stage];
                    // r = r + pk.load(s.c.T if TURNED else s.c)
                    register_tile<float, 64, 64> loaded = load<64>(s.c, role.warpgroup());
                    PK_EACH(register_tile<float, 64, 64>) r(ri, ci) = r(ri, ci) + loaded(ri, ci);
                    shared.parts_ring.release(parts_at);
                }
            }
            {  // with output.fill() as s:
                shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
                auto& s = shared.output[output_at.stage];
                // pk.store(s.c.T if TURNED else s.c, r)
                store(s.c, r, role.warpgroup());
                shared.output_ring.publish_stores(output_at);
            }
            // r = acc[:, j * P : (j + 1) * P]
            r = columns<64, 128>(acc);
            // if last:
            if (last) {
                // for _ in pk.range(pk.world_size() - 1):
                for (int i = 0, i_stop = W - 1; i < i_stop; ++i) {
                    // with parts.drain() as s:
                    shared.parts_ring.wait_full(parts_at, role, SITE_PARTS_DRAIN);
                    auto& s = shared.parts[parts_at.stage];
                    // r = r + pk.load(s.c.T if TURNED else s.c)
                    register_tile<float, 64, 64> loaded_ = load<64>(s.c, role.warpgroup());
                    PK_EACH(register_tile<float, 64, 64>) r(ri, ci) = r(ri, ci) + loaded_(ri, ci);
                    shared.parts_ring.release(parts_at);
                }
            }
            {  // with output.fill() as s:
                shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
                auto& s = shared.output[output_at.stage];
                // pk.store(s.c.T if TURNED else s.c, r)
                store(s.c, r, role.warpgroup());
                shared.output_ring.publish_stores(output_at);
            }
            // r = acc[:, j * P : (j + 1) * P]
            r = columns<128, 192>(acc);
            // if last:
            if (last) {
                // for _ in pk.range(pk.world_size() - 1):
                for (int i = 0, i_stop = W - 1; i < i_stop; ++i) {
                    // with parts.drain() as s:
                    shared.parts_ring.wait_full(parts_at, role, SITE_PARTS_DRAIN);
                    auto& s = shared.parts[parts_at.stage];
                    // r = r + pk.load(s.c.T if TURNED else s.c)
                    register_tile<float, 64, 64> loaded__ = load<64>(s.c, role.warpgroup());
                    PK_EACH(register_tile<float, 64, 64>) r(ri, ci) = r(ri, ci) + loaded__(ri, ci);
                    shared.parts_ring.release(parts_at);
                }
            }
            {  // with output.fill() as s:
                shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
                auto& s = shared.output[output_at.stage];
                // pk.store(s.c.T if TURNED else s.c, r)
                store(s.c, r, role.warpgroup());
                shared.output_ring.publish_stores(output_at);
            }
            // r = acc[:, j * P : (j + 1) * P]
            r = columns<192, 256>(acc);
            // if last:
            if (last) {
                // for _ in pk.range(pk.world_size() - 1):
                for (int i = 0, i_stop = W - 1; i < i_stop; ++i) {
                    // with parts.drain() as s:
                    shared.parts_ring.wait_full(parts_at, role, SITE_PARTS_DRAIN);
                    auto& s = shared.parts[parts_at.stage];
                    // r = r + pk.load(s.c.T if TURNED else s.c)
                    register_tile<float, 64, 64> loaded___ = load<64>(s.c, role.warpgroup());
                    PK_EACH(register_tile<float, 64, 64>) r(ri, ci) = r(ri, ci) + loaded___(ri, ci);
                    shared.parts_ring.release(parts_at);
                }
            }
            {  // with output.fill() as s:
                shared.output_ring.wait_empty(output_at, role, SITE_OUTPUT_FILL);
                auto& s = shared.output[output_at.stage];
                // pk.store(s.c.T if TURNED else s.c, r)
                store(s.c, r, role.warpgroup());
                shared.output_ring.publish_stores(output_at);
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------- storer
PK_DEVICE void storer(const params& p, shared_map& shared) {
    storer_role role(p.ctx, shared.launch);
    prefetch(p.c_map);
    cursor<3> parts_at;
    cursor<2> output_at;
    const signal_array<2> arrived(p.arrived_offset, p.arrived_shape_0, p.arrived_shape_1);
    signal_queue<1> deferred(shared.signal_slots);
    int task = blockIdx.x;  // the block's next, counted over all task loops

    // me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    const int me = p.ctx.rank;
    const int W = p.ctx.world;
    const int rows = ceil_div(p.c_rows, 128);
    const int cols = ceil_div(p.c_cols, 256);
    // lag = pk.min(LAG, rows * cols)
    const int lag = min(80, rows * cols);
    // for step, turn in pk.tasks(rows * cols + lag, W, group=1):
    const int tasks = (rows * cols + lag) * W;
    for (; task < tasks; task += gridDim.x) {
        const auto at = coordinate<1>(task, rows * cols + lag, W);
        const int step = at[0];
        const int turn = at[1];
        role.visit(step, turn);
        // owner = owner_of(step, turn, STEPS, SHIFT)
        const int owner = (me + turn + step / 66 + 1) % W;
        // t = step - lag if owner == me else step
        const int t = owner == me ? step - lag : step;
        // if t >= 0 and t < rows * cols:
        if (t >= 0 && t < rows * cols) {
            // group = t // (G * cols)
            const int group = floor_div(t, cols * 8);
            // height, i = pk.min(G, rows - group * G), t - group * (G * cols)
            const int height = min(8, rows - group * 8);
            const int i = t - group * (cols * 8);
            // m, n = place(t, rows, cols, GROUP)
            const int m = group * 8 + floor_mod(i, height);
            const int n = floor_div(i, height);
            // me, W = pk.rank(), pk.world_size()
            const int me_1 = me;
            const int W_1 = W;
            // last = owner == me
            const bool last = owner == me_1;
            // elif last:
            if (last) {
                // pk.wait(arrived, (m, n), W - 1)
                deferred.flush(role);
                wait(role, arrived, arrived.index(m, n), W_1 - 1, SITE_ARRIVED_WAIT);
                // for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
                for (int r_i = 0, r_i_stop = W - 1; r_i < r_i_stop; ++r_i) {
                    const int r = (me + r_i + 1) % W;
                    {  // with parts.fill() as s:
                        shared.parts_ring.wait_empty(parts_at, role, SITE_PARTS_FILL, deferred);
                        auto& s = shared.parts[parts_at.stage];
                        mbarrier& full = shared.parts_ring.full[parts_at.stage];
                        // pk.load_async(s.c, part[r], at)
                        deferred.meet(role, SITE_PART_LOAD_ASYNC);
                        if (role.issues()) {
                            expect_loads(full, s.c);
                            load_expected(s.c, p.part_maps[r], full, owner, m * 128, n * 256);
                        }
                        shared.parts_ring.publish_expected(parts_at, role);
                    }
                }
                // for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
                for (int r_i = 0, r_i_stop = W - 1; r_i < r_i_stop; ++r_i) {
                    const int r = (me + r_i + 1) % W;
                    {  // with parts.fill() as s:
                        shared.parts_ring.wait_empty(parts_at, role, SITE_PARTS_FILL, deferred);
                        auto& s = shared.parts[parts_at.stage];
                        mbarrier& full = shared.parts_ring.full[parts_at.stage];
                        // pk.load_async(s.c, part[r], at)
                        deferred.meet(role, SITE_PART_LOAD_ASYNC);
                        if (role.issues()) {
                            expect_loads(full, s.c);
                            load_expected(s.c, p.part_maps[r], full, owner, m * 128, n * 256 + 64);
                        }
                        shared.parts_ring.publish_expected(parts_at, role);
                    }
                }
                // for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
                for (int r_i = 0, r_i_stop = W - 1; r_i < r_i_stop; ++r_i) {
                    const int r = (me + r_i + 1) % W;
                    {  // with parts.fill() as s:
                        shared.parts_ring.wait_empty(parts_at, role, SITE_PARTS_FILL, deferred);
                        auto& s = shared.parts[parts_at.stage];
                        mbarrier& full = shared.parts_ring.full[parts_at.stage];
                        // pk.load_async(s.c, part[r], at)
                        deferred.meet(role, SITE_PART_LOAD_ASYNC);
                        if (role.issues()) {
                            expect_loads(full, s.c);
                            load_expected(s.c, p.part_maps[r], full, owner, m * 128, n * 256 + 128);
                        }
                        shared.parts_ring.publish_expected(parts_at, role);
                    }
                }
                {  // with output.drain() as s:
                    shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN, deferred);
                    auto& s = shared.output[output_at.stage];
                    // pk.store_async(dst, s.c, at)
                    if (role.issues()) store_async(p.c_map, s.c, m * 128, n * 256);
                    shared.output_ring.release_after_store(output_at);
                    deferred.committed(role);
                }
                // for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
                for (int r_i = 0, r_i_stop = W - 1; r_i < r_i_stop; ++r_i) {
                    const int r = (me + r_i + 1) % W;
                    shared.output_ring.finish_stores(output_at);
                    {  // with parts.fill() as s:
                        shared.parts_ring.wait_empty(parts_at, role, SITE_PARTS_FILL, deferred);
                        auto& s = shared.parts[parts_at.stage];
                        mbarrier& full = shared.parts_ring.full[parts_at.stage];
                        // pk.load_async(s.c, part[r], at)
                        deferred.meet(role, SITE_PART_LOAD_ASYNC);
                        if (role.issues()) {
                            expect_loads(full, s.c);
                            load_expected(s.c, p.part_maps[r], full, owner, m * 128, n * 256 + 192);
                        }
                        shared.parts_ring.publish_expected(parts_at, role);
                    }
                }
                {  // with output.drain() as s:
                    shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN, deferred);
                    auto& s = shared.output[output_at.stage];
                    // pk.store_async(dst, s.c, at)
                    if (role.issues()) store_async(p.c_map, s.c, m * 128, n * 256 + 64);
                    shared.output_ring.release_after_store(output_at);
                    deferred.committed(role);
                }
                {  // with output.drain() as s:
                    shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN, deferred);
                    auto& s = shared.output[output_at.stage];
                    // pk.store_async(dst, s.c, at)
                    if (role.issues()) store_async(p.c_map, s.c, m * 128, n * 256 + 128);
                    shared.output_ring.release_after_store(output_at);
                    deferred.committed(role);
                }
                {  // with output.drain() as s:
                    shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN, deferred);
                    auto& s = shared.output[output_at.stage];
                    // pk.store_async(dst, s.c, at)
                    if (role.issues()) store_async(p.c_map, s.c, m * 128, n * 256 + 192);
                    shared.output_ring.release_after_store(output_at);
                    deferred.committed(role);
                }
            } else {
                {  // with output.drain() as s:
                    shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN_2, deferred);
                    auto& s = shared.output[output_at.stage];
                    // pk.store_async(dst, s.c, piece_at(row, n, j, SHAPE))
                    deferred.meet(role, SITE_PART_STORE_ASYNC);
                    if (role.issues()) store_async(p.part_maps[me_1], s.c, owner, m * 128, n * 256);
                    shared.output_ring.release_after_store(output_at);
                    deferred.committed(role);
                }
                {  // with output.drain() as s:
                    shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN_2, deferred);
                    auto& s = shared.output[output_at.stage];
                    // pk.store_async(dst, s.c, piece_at(row, n, j, SHAPE))
                    if (role.issues()) store_async(p.part_maps[me_1], s.c, owner, m * 128, n * 256 + 64);
                    shared.output_ring.release_after_store(output_at);
                    deferred.committed(role);
                }
                {  // with output.drain() as s:
                    shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN_2, deferred);
                    auto& s = shared.output[output_at.stage];
                    // pk.store_async(dst, s.c, piece_at(row, n, j, SHAPE))
                    if (role.issues()) store_async(p.part_maps[me_1], s.c, owner, m * 128, n * 256 + 128);
                    shared.output_ring.release_after_store(output_at);
                    deferred.committed(role);
                }
                {  // with output.drain() as s:
                    shared.output_ring.wait_full(output_at, role, SITE_OUTPUT_DRAIN_2, deferred);
                    auto& s = shared.output[output_at.stage];
                    // pk.store_async(dst, s.c, piece_at(row, n, j, SHAPE))
                    if (role.issues()) store_async(p.part_maps[me_1], s.c, owner, m * 128, n * 256 + 192);
                    shared.output_ring.release_after_store(output_at);
                    deferred.committed(role);
                }
                // pk.signal(arrived, (m, n), owner)
                deferred.signal(role, arrived, arrived.index(m, n), owner, 1, SITE_ARRIVED_SIGNAL);
            }
        }
        shared.output_ring.finish_stores(output_at);
    }
    deferred.flush(role);
    shared.parts_ring.finish_loads(parts_at, shared.launch);
    store_wait<0>();
}

// --------------------------------------------------------------------------------------------- main kernel
// Reached by every warp, in each branch: no code stands behind the roles, whose register budgets differ.
PK_DEVICE void main_kernel(const params& p, shared_map& shared) {
    if (threadIdx.x == 0) {
        shared.inputs_ring.init(/*fill arrivals=*/1, /*drain arrivals=*/8);
        shared.output_ring.init(/*fill arrivals=*/8, /*drain arrivals=*/1);
        shared.parts_ring.init(/*fill arrivals=*/1, /*drain arrivals=*/8);
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
pk_matmul_reduce_scatter_ordered(const __grid_constant__ params p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    main_kernel(p, *reinterpret_cast<shared_map*>(memory));
}
