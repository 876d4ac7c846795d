#pragma once
// A call of cuLaunchKernelEx from Python in a tenth of a microsecond: four integers in, the CUresult out.

#include <Python.h>

namespace pk {

// launch(entry, config, function, params) -> int: `entry` is the address of cuLaunchKernelEx, the others its arguments.
extern PyMethodDef launch_method;

}  // namespace pk
