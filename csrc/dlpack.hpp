#pragma once
// What pk needs of the DLPack C exchange API (dlpack.h 1.x): reading a tensor's address and layout without Python.
//
// A tensor type of Python publishes a table of C functions as `type.__dlpack_c_exchange_api__`, a capsule.  The header
// is the same in all versions; the rest holds within a major version.

#include <cstdint>

namespace pk::dlpack {

constexpr char capsule[] = "dlpack_exchange_api";
constexpr std::uint32_t major_version = 1;
constexpr std::uint8_t floating = 2;  // the code of IEEE floating point

struct Tensor {
    void* data;
    struct {
        std::int32_t type, id;
    } device;
    std::int32_t ndim;
    struct {
        std::uint8_t code, bits;
        std::uint16_t lanes;
    } dtype;
    std::int64_t *shape, *strides;  // the producer's; strides in elements
    std::uint64_t byte_offset;
};
static_assert(sizeof(Tensor) == 48, "DLTensor");

struct Header {
    std::uint32_t major, minor;
    Header* previous;  // a table of an older version, or null
};

struct ExchangeApi {
    Header header;
    void* managed_tensor_allocator;
    void* managed_tensor_from_py_object_no_sync;
    void* managed_tensor_to_py_object_no_sync;
    // May be null.  Fills `out`, which the tensor keeps owning; 0, or -1 with an exception set.  No synchronisation.
    int (*tensor_from_py_object_no_sync)(void* object, Tensor* out);
    void* current_work_stream;
};

}  // namespace pk::dlpack
