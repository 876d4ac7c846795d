#pragma once
// The first half of a warm call: from its arguments to the launch that was packed for equal ones.
//
// The Python twin is `Kernel._repeat` in pk/kernel.py, where the meaning of the keys is documented.

#include <Python.h>

namespace pk {

// finder(tensor_types, base_type, environment, variables, names, scalars, defaults, fallback) -> find, or None where
// tensors cannot be read.  tensor_types: exactly these are read here, other instances of base_type by the fallback;
// environment, variables: a dict and the keys of it that calls depend on; names: of the kernel's parameters; scalars,
// defaults: name of a run-time scalar -> its place in the values, and its default there.
// find(kernel, warm, sms, args, kwargs) -> True if it launched, else the key of the call, or None if it cannot have one.
extern PyMethodDef finder_method;

}  // namespace pk
