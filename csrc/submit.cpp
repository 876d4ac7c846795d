#include "submit.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <structmember.h>

namespace pk {
namespace {

constexpr int max_scalars = 32;

struct Scalar {
    bool integer;
    Py_ssize_t offset, position;
};

struct Submit {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *context, *acquire, *waits, *release, *stream_of, *device, *launch;
    const volatile std::uint32_t* state;
    char* buffer;
    int scalars;
    Scalar scalar[max_scalars];
};

struct {
    PyObject *hang, *check, *attempts, *submitted, *ordered, *follow, *refuse, *collide, *one;
} names;

bool intern() {
    if (names.one) return true;
    const struct {
        PyObject** at;
        const char* text;
    } all[] = {{&names.hang, "hang"}, {&names.check, "check"}, {&names.attempts, "attempts"},
               {&names.submitted, "submitted"}, {&names.ordered, "ordered"}, {&names.follow, "follow"},
               {&names.refuse, "refuse"}, {&names.collide, "collide"}};
    for (const auto& name : all)
        if (!*name.at && !(*name.at = PyUnicode_InternFromString(name.text))) return false;
    return (names.one = PyLong_FromLong(1)) != nullptr;
}

// 1: stored; 0: does not fit; -1: an exception.  As struct's "<i" and "<f".
int store(char* at, bool integer, PyObject* value) {
    if (integer) {
        if (!PyIndex_Check(value)) return 0;
        PyObject* number = PyNumber_Index(value);
        if (!number) return -1;
        int overflow = 0;
        const long long wide = PyLong_AsLongLongAndOverflow(number, &overflow);
        Py_DECREF(number);
        const auto narrow = static_cast<std::int32_t>(wide);
        if (overflow || narrow != wide) return 0;
        std::memcpy(at, &narrow, sizeof narrow);
        return 1;
    }
    const double wide = PyFloat_AsDouble(value);
    if (wide == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    const auto narrow = static_cast<float>(wide);
    if (std::isinf(narrow) && !std::isinf(wide)) return 0;
    std::memcpy(at, &narrow, sizeof narrow);
    return 1;
}

int fill(const Submit* self, PyObject* values) {
    for (int i = 0; i < self->scalars; ++i) {
        const Scalar& s = self->scalar[i];
        if (s.position >= PyTuple_GET_SIZE(values)) {
            PyErr_SetString(PyExc_IndexError, "fewer values than scalars");
            return -1;
        }
        const int done = store(self->buffer + s.offset, s.integer, PyTuple_GET_ITEM(values, s.position));
        if (done != 1) return done;
    }
    return 1;
}

bool finish(PyObject* result) {
    Py_XDECREF(result);
    return result != nullptr;
}

bool count_attempt(PyObject* context) {
    PyObject* before = PyObject_GetAttr(context, names.attempts);
    PyObject* after = before ? PyNumber_Add(before, names.one) : nullptr;
    const bool set = after && PyObject_SetAttr(context, names.attempts, after) == 0;
    Py_XDECREF(before);
    Py_XDECREF(after);
    return set;
}

bool enqueue(const Submit* self) {
    PyObject* stream = PyObject_CallOneArg(self->stream_of, self->device);
    if (!stream) return false;
    PyObject* ordered = PyObject_GetAttr(self->context, names.ordered);
    const int same = ordered ? PyObject_RichCompareBool(stream, ordered, Py_EQ) : -1;
    Py_XDECREF(ordered);
    bool fine = same >= 0;
    if (same == 0) fine = finish(PyObject_CallMethodOneArg(self->context, names.follow, stream));
    fine = fine && finish(PyObject_CallOneArg(self->launch, stream));
    Py_DECREF(stream);
    return fine;
}

// Tells the other processes what the exception that is set is about; it stays set, unless telling raises another.
void refuse(PyObject* context) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value && trace) PyException_SetTraceback(value, trace);
    const bool told = PyObject_SetAttr(context, names.submitted, Py_False) == 0 &&
                      finish(PyObject_CallMethodOneArg(context, names.refuse, value ? value : Py_None));
    if (told) {
        PyErr_Restore(type, value, trace);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

// With the context's lock held: True, False if a scalar does not fit, or null.
PyObject* in_turn(const Submit* self, PyObject* values) {
    const int filled = fill(self, values);
    if (filled < 0) return nullptr;
    if (!filled) return Py_NewRef(Py_False);
    if (!count_attempt(self->context)) return nullptr;
    if (!enqueue(self)) {
        refuse(self->context);
        return nullptr;
    }
    return PyObject_SetAttr(self->context, names.submitted, Py_True) == 0 ? Py_NewRef(Py_True) : nullptr;
}

bool hangs(const Submit* self, bool& answer) {
    PyObject* hang = PyObject_GetAttr(self->context, names.hang);
    if (!hang) return false;
    answer = hang != Py_None || *self->state != 0;
    Py_DECREF(hang);
    return true;
}

// Takes the context's lock.  Where a thread does not wait for another one, finding it taken is an exception.
bool acquire(const Submit* self) {
    PyObject* taken = PyObject_CallOneArg(self->acquire, self->waits);
    Py_XDECREF(taken);
    if (taken != Py_False) return taken != nullptr;
    if (finish(PyObject_CallMethodNoArgs(self->context, names.collide)))
        PyErr_SetString(PyExc_RuntimeError, "collide() must raise");
    return false;
}

PyObject* submit(PyObject* object, PyObject* const* args, std::size_t count, PyObject* keywords) {
    auto* self = reinterpret_cast<Submit*>(object);
    if (PyVectorcall_NARGS(count) != 1 || keywords || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "submit(values), a tuple");
        return nullptr;
    }
    if (!self->context) {
        PyErr_SetString(PyExc_RuntimeError, "the launch is being taken apart");
        return nullptr;
    }
    Py_INCREF(object);  // a launch may empty the table that holds this
    PyObject* answer = nullptr;
    bool hung = false;
    if (hangs(self, hung) && (!hung || finish(PyObject_CallMethodNoArgs(self->context, names.check))) &&
        acquire(self)) {
        answer = in_turn(self, args[0]);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        const bool released = finish(PyObject_CallNoArgs(self->release));
        if (released)
            PyErr_Restore(type, value, trace);
        else
            Py_CLEAR(answer);
    }
    Py_DECREF(object);
    return answer;
}

bool take_scalars(Submit* self, PyObject* scalars) {
    const Py_ssize_t count = PyTuple_GET_SIZE(scalars);
    if (count > max_scalars) {
        PyErr_SetString(PyExc_ValueError, "too many scalars");
        return false;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        const char* kind;
        Scalar& s = self->scalar[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(scalars, i), "snn", &kind, &s.offset, &s.position)) return false;
        if (s.offset < 0 || s.position < 0) {
            PyErr_SetString(PyExc_ValueError, "a scalar before the buffer");
            return false;
        }
        s.integer = std::strcmp(kind, "int") == 0;
    }
    self->scalars = static_cast<int>(count);
    return true;
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *context, *scalars, *stream_of, *device, *launch;
    unsigned long long state, buffer;
    if (!PyArg_ParseTuple(args, "OKKO!OOO:Submit", &context, &state, &buffer, &PyTuple_Type, &scalars, &stream_of,
                          &device, &launch))
        return nullptr;
    PyObject* object = type->tp_alloc(type, 0);
    if (!object) return nullptr;
    auto* self = reinterpret_cast<Submit*>(object);
    self->call = submit;
    self->state = reinterpret_cast<const volatile std::uint32_t*>(static_cast<std::uintptr_t>(state));
    self->buffer = reinterpret_cast<char*>(static_cast<std::uintptr_t>(buffer));
    self->context = Py_NewRef(context);
    self->stream_of = Py_NewRef(stream_of);
    self->device = Py_NewRef(device);
    self->launch = Py_NewRef(launch);
    PyObject* order = PyObject_GetAttrString(context, "order");
    self->acquire = order ? PyObject_GetAttrString(order, "acquire") : nullptr;
    self->release = order ? PyObject_GetAttrString(order, "release") : nullptr;
    Py_XDECREF(order);
    self->waits = self->release ? PyObject_GetAttrString(context, "waits") : nullptr;
    if (!intern() || !self->acquire || !self->release || !self->waits || !take_scalars(self, scalars)) Py_CLEAR(object);
    return object;
}

int visit_all(PyObject* object, visitproc visit, void* arg) {
    auto* self = reinterpret_cast<Submit*>(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->context);
    Py_VISIT(self->acquire);
    Py_VISIT(self->waits);
    Py_VISIT(self->release);
    Py_VISIT(self->stream_of);
    Py_VISIT(self->device);
    Py_VISIT(self->launch);
    return 0;
}

int clear(PyObject* object) {
    auto* self = reinterpret_cast<Submit*>(object);
    Py_CLEAR(self->context);
    Py_CLEAR(self->acquire);
    Py_CLEAR(self->waits);
    Py_CLEAR(self->release);
    Py_CLEAR(self->stream_of);
    Py_CLEAR(self->device);
    Py_CLEAR(self->launch);
    return 0;
}

void dealloc(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, static_cast<Py_ssize_t>(offsetof(Submit, call)), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(create)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_traverse, reinterpret_cast<void*>(visit_all)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_members, members},
    {Py_tp_doc, const_cast<char*>("A packed launch of a context; called with the values of its scalars.")},
    {0, nullptr},
};

PyType_Spec spec = {"pk._C.Submit", sizeof(Submit), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

PyObject* make_submit_type() { return PyType_FromSpec(&spec); }

}  // namespace pk
