#pragma once
// A call of cuLaunchKernelEx from Python in a tenth of a microsecond: the stream in, everything else bound before.

#include <Python.h>

namespace pk {

// launcher(entry, config, function, params, failed) -> launch.  `entry` is the address of cuLaunchKernelEx, the next
// three its arguments, which the caller keeps alive.  launch(stream) sets the configuration's stream, calls it without
// the GIL, and returns None, or failed(status) if the status is not 0.
extern PyMethodDef launcher_method;

}  // namespace pk
