#pragma once
// The first half of a warm call: from its arguments to the launch that was packed for equal ones.
//
// The Python twin is `Kernel._repeat` in pk/kernel.py, where the meaning of the keys is documented.

#include <Python.h>

namespace pk {

// finder(tensor_types, base_type, environment, variables, names, scalars, defaults, fallback) -> find, or None where
// tensors cannot be read.
// tensor_types: exactly these are read here, others of base_type by the fallback;
// environment, variables: a dict and the keys of it that calls depend on; names: of the kernel's parameters; scalars,
// defaults: name of a run-time scalar -> its place in the values, and its default there.
// find(kernel, warm, sms, args, kwargs) -> True if it launched, else the key of the call, or None if it has none.
extern PyMethodDef finder_method;

// unchanged(entries) -> bool: whether `space[name] is value` for all entries (space, name, value), a dict, a str and
// any object.  False also for what is no tuple of such: somebody has to look closer.
extern PyMethodDef unchanged_method;

}  // namespace pk
