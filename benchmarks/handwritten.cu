// The transfers of primitive_kernels.py as a CUDA programmer would write them: bulk copies of `bytes` each, STAGES in
// flight, one thread a block that issues them.  No bounded waits, no launch protocol: what pk is measured against.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int STAGES = 4;

__device__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ void init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void wait(u64* barrier, u32 phase) {
    u32 done = 0;
    while (!done)
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(phase) : "memory");
}

__device__ void load(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ void store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// As `store`: block b loads part b of x once, and stores it to parts b, b + blocks, ... of y.
extern "C" __global__ void __launch_bounds__(128, 1) hand_store(const char* x, char* y, int repeats, int bytes) {
    extern __shared__ __align__(1024) char stage[];
    __shared__ u64 full;
    if (threadIdx.x != 0) return;
    init(&full, STAGES);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (int s = 0; s < STAGES; ++s) load(stage + s * bytes, x + static_cast<u64>(blockIdx.x) * bytes, bytes, &full);
    wait(&full, 0);
    for (int i = 0; i < repeats; ++i) {
        const u64 part = static_cast<u64>(i) * gridDim.x + blockIdx.x;
        store(y + part * bytes, stage + i % STAGES * bytes, bytes);
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STAGES - 1) : "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// As `copy`: y = x in `parts` parts; a thread that loads and a thread that stores.
extern "C" __global__ void __launch_bounds__(128, 1) hand_copy(const char* x, char* y, int parts, int bytes) {
    extern __shared__ __align__(1024) char stage[];
    __shared__ u64 full[STAGES], empty[STAGES];
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            init(&full[s], 1);
            init(&empty[s], 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int i = 0;
        for (int part = blockIdx.x; part < parts; part += gridDim.x, ++i) {
            const int s = i % STAGES;
            wait(&empty[s], (i / STAGES & 1) ^ 1);
            load(stage + s * bytes, x + static_cast<u64>(part) * bytes, bytes, &full[s]);
        }
    } else if (threadIdx.x == 32) {
        constexpr int LAG = STAGES - 2;  // stores that may still read their stages
        int i = 0;
        for (int part = blockIdx.x; part < parts; part += gridDim.x, ++i) {
            const int s = i % STAGES;
            wait(&full[s], i / STAGES & 1);
            store(y + static_cast<u64>(part) * bytes, stage + s * bytes, bytes);
            asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAG) : "memory");
            if (i >= LAG) arrive(&empty[(i - LAG) % STAGES]);
        }
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

/// For the cost of a launch.
extern "C" __global__ void hand_nothing() {}
