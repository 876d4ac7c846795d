#include "launch.hpp"

#include <cstddef>
#include <cstdint>
#include <new>

namespace pk {
namespace {

using Entry = int (*)(const void* config, void* function, void** params, void** extra);

struct Config {  // CUlaunchConfig
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};
static_assert(offsetof(Config, stream) == 32 && sizeof(Config) == 56, "CUlaunchConfig");

struct Bound {
    Entry entry;
    Config* config;
    void* function;
    void** params;
    PyObject* failed;
};

constexpr char bound_name[] = "pk._C.launch";

PyObject* launch(PyObject* self, PyObject* stream) {
    auto* bound = static_cast<Bound*>(PyCapsule_GetPointer(self, bound_name));
    if (!bound) return nullptr;
    const std::size_t handle = PyLong_AsSize_t(stream);
    if (handle == static_cast<std::size_t>(-1) && PyErr_Occurred()) return nullptr;
    bound->config->stream = reinterpret_cast<void*>(handle);
    int status;
    Py_BEGIN_ALLOW_THREADS  // a full queue blocks the call
        status = bound->entry(bound->config, bound->function, bound->params, nullptr);
    Py_END_ALLOW_THREADS
    if (status == 0) Py_RETURN_NONE;
    PyObject* number = PyLong_FromLong(status);
    if (!number) return nullptr;
    PyObject* answer = PyObject_CallOneArg(bound->failed, number);
    Py_DECREF(number);
    return answer;
}

PyMethodDef launch_method = {"launch", launch, METH_O, "launch(stream)"};

void drop(PyObject* capsule) {
    auto* bound = static_cast<Bound*>(PyCapsule_GetPointer(capsule, bound_name));
    Py_DECREF(bound->failed);
    delete bound;
}

PyObject* make(PyObject*, PyObject* args) {
    PyObject *addresses[4], *failed;
    if (!PyArg_ParseTuple(args, "OOOOO:launcher", addresses, addresses + 1, addresses + 2, addresses + 3, &failed))
        return nullptr;
    void* values[4];
    for (int i = 0; i < 4; ++i) {
        const std::size_t value = PyLong_AsSize_t(addresses[i]);
        if (value == static_cast<std::size_t>(-1) && PyErr_Occurred()) return nullptr;
        values[i] = reinterpret_cast<void*>(value);
    }
    auto* bound = new (std::nothrow) Bound{reinterpret_cast<Entry>(values[0]), static_cast<Config*>(values[1]),
                                           values[2], static_cast<void**>(values[3]), failed};
    if (!bound) return PyErr_NoMemory();
    PyObject* capsule = PyCapsule_New(bound, bound_name, drop);
    if (!capsule) {
        delete bound;
        return nullptr;
    }
    Py_INCREF(failed);
    PyObject* made = PyCFunction_New(&launch_method, capsule);
    Py_DECREF(capsule);
    return made;
}

}  // namespace

PyMethodDef launcher_method = {"launcher", make, METH_VARARGS,
                               "launcher(entry, config, function, params, failed) -> launch"};

}  // namespace pk
