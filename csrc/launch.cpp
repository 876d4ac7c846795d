#include "launch.hpp"

#include <cstdint>

namespace pk {
namespace {

using Entry = int (*)(const void* config, void* function, void** params, void** extra);

PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "launch(entry, config, function, params)");
        return nullptr;
    }
    std::uintptr_t values[4];
    for (int i = 0; i < 4; ++i) {
        values[i] = PyLong_AsSize_t(args[i]);
        if (values[i] == static_cast<std::uintptr_t>(-1) && PyErr_Occurred()) return nullptr;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS  // a full queue blocks the call
        status = reinterpret_cast<Entry>(values[0])(reinterpret_cast<const void*>(values[1]),
                                                    reinterpret_cast<void*>(values[2]),
                                                    reinterpret_cast<void**>(values[3]), nullptr);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

}  // namespace

PyMethodDef launch_method = {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(launch)),
                             METH_FASTCALL, "launch(entry, config, function, params) -> CUresult"};

}  // namespace pk
