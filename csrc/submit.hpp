#pragma once
// The second half of a warm call: as `Packed._submit` of pk/runtime/packed.py, its Python twin, on the same objects.

#include <Python.h>

namespace pk {

// The type `Submit(context, state, buffer, scalars, stream_of, device, launch)`, a new reference, or null.  state,
// buffer: addresses of the first record's state and of the parameters, which the caller keeps alive; scalars: a tuple
// of (kind "int" or "float", offset in the buffer, position in the values).  An instance is called with the values.
PyObject* make_submit_type();

}  // namespace pk
