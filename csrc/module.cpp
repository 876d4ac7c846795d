// pk._C: what Python is too late or too slow for.  Nothing of torch or CUDA is compiled in.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "explore.hpp"
#include "launch.hpp"
#include "submit.hpp"
#include "warm.hpp"
#include "watch.hpp"

namespace py = pybind11;

namespace {

using Flat = std::vector<std::vector<std::int32_t>>;  // the lists of System.flat

pk::Programs programs_of(const Flat& f) {
    if (f.size() != 10) throw std::invalid_argument("explore: ten lists, see System.flat");
    return {f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9]};
}

// An int32 for each event and actor, as bytes.
py::bytes reach(const Flat& flat, const std::vector<std::int32_t>& events) {
    const pk::Programs programs = programs_of(flat);
    std::vector<std::int32_t> found;
    {
        py::gil_scoped_release released;
        found = pk::reach(programs, events);
    }
    return {reinterpret_cast<const char*>(found.data()), found.size() * sizeof(std::int32_t)};
}

// (states, transitions, deadlocks, violations, finals, widest, depth, complete, [(deadlock, actor, trace), ...])
py::tuple explore(const Flat& flat, std::uint64_t max_states, bool reduce, bool deadlocks, bool stop) {
    const pk::Programs programs = programs_of(flat);
    pk::Found found;
    {
        py::gil_scoped_release released;
        found = pk::explore(programs, {max_states, reduce, deadlocks, stop}, [] {
            py::gil_scoped_acquire held;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();  // Ctrl-C
        });
    }
    py::list failures;
    for (const pk::Failure& f : found.failures) failures.append(py::make_tuple(f.deadlock, f.actor, f.trace));
    return py::make_tuple(found.states, found.transitions, found.deadlocks, found.violations, found.finals, found.widest,
                          found.depth, found.complete, failures);
}

}  // namespace

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

    m.def("explore", &explore, py::arg("flat"), py::arg("max_states"), py::arg("reduce"), py::arg("deadlocks"),
          py::arg("stop"), "Every order of the steps of a system; see csrc/explore.hpp and pk.sim.explore.");
    m.def("reach", &reach, py::arg("flat"), py::arg("events"),
          "How far each actor comes without each event, int32; see csrc/reach.cpp and pk.sim.order.");

    // Before the interpreter takes modules apart, and before the runtime frees the pages it registered earlier.
    py::module_::import("atexit").attr("register")(py::cpp_function(&pk::stop_all, release()));
}
