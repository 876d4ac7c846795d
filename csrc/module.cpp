// pk._C: what Python is too late or too slow for.  Nothing of torch or CUDA is compiled in.

#include <pybind11/pybind11.h>

#include "launch.hpp"
#include "submit.hpp"
#include "warm.hpp"
#include "watch.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
    m.doc() = "Native parts of pk; import it through pk.runtime.native only.";
    using release = py::call_guard<py::gil_scoped_release>;

    py::class_<pk::Watch>(m, "Watch", "Watches a page of device records from a thread that needs no GIL.")
        .def(py::init<std::uintptr_t, std::size_t, unsigned, unsigned, int>(), py::arg("address"), py::arg("slots"),
             py::arg("interval_ms") = 100u, py::arg("grace_ms") = 0u, py::arg("fd") = 2)
        .def("name", &pk::Watch::name, py::arg("kernel_id"), py::arg("text"), release(),
             "The text that reports use for records of this kernel.")
        .def("start", &pk::Watch::start, release(), "Begin watching.")
        .def("stop", &pk::Watch::stop, release(), "End and join the thread; the page may be freed afterwards.")
        .def("poll", &pk::Watch::poll, release(), "Look now, report what is due; returns how many records.")
        .def("acknowledge", &pk::Watch::acknowledge, release(), "The records on the page now need no report from here.")
        .def_property_readonly("running", &pk::Watch::running)
        .def_property_readonly("reported", &pk::Watch::reported, "How many records have been reported so far.");

    m.add_object("launcher", PyCFunction_New(&pk::launcher_method, nullptr));
    m.add_object("Submit", py::reinterpret_steal<py::object>(pk::make_submit_type()));
    m.add_object("unchanged", PyCFunction_New(&pk::unchanged_method, nullptr));
    m.add_object("finder", PyCFunction_New(&pk::finder_method, nullptr));

    // Before the interpreter takes modules apart, and before the runtime frees the pages it registered earlier.
    py::module_::import("atexit").attr("register")(py::cpp_function(&pk::stop_all, release()));
}
