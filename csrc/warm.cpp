#include "warm.hpp"

#include <cstring>
#include <initializer_list>
#include <new>

#include "dlpack.hpp"

namespace pk {
namespace {

constexpr int max_types = 4, max_variables = 4, max_ndim = 8;
constexpr Py_ssize_t max_parts = 64;      // arguments and names of one call
constexpr std::size_t max_words = 256;    // of the description of all its tensors
constexpr std::uint64_t tensor_tag = 1, other_tag = 2, name_tag = 4;

// Everything of a kernel that its calls have in common.  Owns what it points to, except the API table, which lives as
// long as the process.  Holds nothing that leads back to the kernel: capsules take no part in garbage collection.
struct Finder {
    int (*read)(void*, dlpack::Tensor*) = nullptr;
    PyObject* types = nullptr;        // tensor types that `read` understands, exactly
    PyObject* base = nullptr;         // other instances of this type are left to the twin
    PyObject* environment = nullptr;  // dict: variable -> text
    PyObject* variables = nullptr;    // tuple of keys of it
    PyObject* scalars = nullptr;      // dict: name of a run-time scalar -> its position in `defaults`
    PyObject* defaults = nullptr;     // tuple
    PyObject* fallback = nullptr;     // the Python twin
    signed char position[max_parts];  // of a positional argument: its position in `defaults`, or -1

    ~Finder() {
        for (PyObject* o : {types, base, environment, variables, scalars, defaults, fallback}) Py_XDECREF(o);
    }
};

constexpr char finder_name[] = "pk._C.finder";
PyObject *submit_name = nullptr, *is_neg_name = nullptr;

enum class Outcome { fine, error, unknown };  // unknown: the twin knows

// The parts of a key while it is collected.  `parts` are new references.
class Call {
public:
    explicit Call(const Finder& finder) : finder_(finder) {}
    Call(const Call&) = delete;
    ~Call() {
        for (Py_ssize_t i = 0; i < count_; ++i) Py_DECREF(parts_[i]);
        Py_XDECREF(values_);
    }

    Outcome start(PyObject* kernel, PyObject* sms) {
        add(Py_NewRef(kernel));
        add(Py_NewRef(sms));
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(finder_.variables); ++i) {
            PyObject* text = PyDict_GetItemWithError(finder_.environment, PyTuple_GET_ITEM(finder_.variables, i));
            if (!text && PyErr_Occurred()) return Outcome::error;
            add(Py_NewRef(text ? text : Py_None));
        }
        values_ = Py_NewRef(finder_.defaults);
        return Outcome::fine;
    }

    Outcome positional(PyObject* args) {
        const Py_ssize_t n = PyTuple_GET_SIZE(args);
        if (n > max_parts) return Outcome::unknown;
        for (Py_ssize_t i = 0; i < n; ++i) {
            const int scalar = finder_.position[i];
            PyObject* given = PyTuple_GET_ITEM(args, i);
            const Outcome o = scalar >= 0 ? number(given, scalar) : value(given);
            if (o != Outcome::fine) return o;
        }
        return Outcome::fine;
    }

    Outcome named(PyObject* kwargs) {
        Py_ssize_t at = 0;
        PyObject *name, *given;
        while (PyDict_Next(kwargs, &at, &name, &given)) {
            if (!word(name_tag)) return Outcome::unknown;
            if (!add(Py_NewRef(name))) return Outcome::unknown;
            PyObject* scalar = PyDict_GetItemWithError(finder_.scalars, name);
            if (!scalar && PyErr_Occurred()) return Outcome::error;
            const Outcome o = scalar ? number(given, PyLong_AsLong(scalar)) : value(given);
            if (o != Outcome::fine) return o;
        }
        return Outcome::fine;
    }

    // The finished key, a new reference.
    PyObject* key() {
        const auto* bytes = reinterpret_cast<const char*>(words_);
        PyObject* layout = PyBytes_FromStringAndSize(bytes, words_used_ * sizeof *words_);
        if (!layout) return nullptr;
        PyObject* tuple = PyTuple_New(count_ + 1);
        if (!tuple) {
            Py_DECREF(layout);
            return nullptr;
        }
        PyTuple_SET_ITEM(tuple, 0, layout);
        for (Py_ssize_t i = 0; i < count_; ++i) PyTuple_SET_ITEM(tuple, i + 1, parts_[i]);
        count_ = 0;
        return tuple;
    }

    PyObject* values() const { return values_; }

private:
    bool add(PyObject* owned) {
        if (owned && count_ < max_parts) {
            parts_[count_++] = owned;
            return true;
        }
        Py_XDECREF(owned);
        return false;
    }

    bool word(std::uint64_t w) {
        if (words_used_ == max_words) return false;
        words_[words_used_++] = w;
        return true;
    }

    // A run-time scalar: its type is part of the key, its value is not.
    Outcome number(PyObject* given, long index) {
        if (!word(other_tag) || !add(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(given))))) return Outcome::unknown;
        if (values_ == finder_.defaults) {
            PyObject* copy = PyTuple_New(PyTuple_GET_SIZE(values_));
            if (!copy) return Outcome::error;
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values_); ++i)
                PyTuple_SET_ITEM(copy, i, Py_NewRef(PyTuple_GET_ITEM(values_, i)));
            Py_SETREF(values_, copy);
        }
        PyObject* before = PyTuple_GET_ITEM(values_, index);
        PyTuple_SET_ITEM(values_, index, Py_NewRef(given));
        Py_DECREF(before);
        return Outcome::fine;
    }

    Outcome value(PyObject* given) {
        PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(given));
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(finder_.types); ++i)
            if (type == PyTuple_GET_ITEM(finder_.types, i)) return tensor(given);
        if (PyType_IsSubtype(Py_TYPE(given), reinterpret_cast<PyTypeObject*>(finder_.base))) return Outcome::unknown;
        PyObject* part = typed(given);
        if (!part) return Outcome::error;
        return add(part) && word(other_tag) ? Outcome::fine : Outcome::unknown;
    }

    // As pk.dsl.frontend.typed: equal values of different types differ, and so do 0.0 and -0.0; NaNs are alike.
    static PyObject* typed(PyObject* given) {
        if (PyFloat_Check(given) && !(PyFloat_AS_DOUBLE(given) < 0.0 || PyFloat_AS_DOUBLE(given) > 0.0)) {
            PyObject* text = PyObject_Repr(given);
            PyObject* pair = text ? PyTuple_Pack(2, Py_TYPE(given), text) : nullptr;
            Py_XDECREF(text);
            return pair;
        }
        if (!PyTuple_Check(given)) return PyTuple_Pack(2, Py_TYPE(given), given);
        if (Py_EnterRecursiveCall(" in a constexpr")) return nullptr;
        PyObject* tuple = PyTuple_New(PyTuple_GET_SIZE(given));
        for (Py_ssize_t i = 0; tuple && i < PyTuple_GET_SIZE(given); ++i) {
            PyObject* part = typed(PyTuple_GET_ITEM(given, i));
            if (part)
                PyTuple_SET_ITEM(tuple, i, part);
            else
                Py_CLEAR(tuple);
        }
        Py_LeaveRecursiveCall();
        return tuple;
    }

    Outcome tensor(PyObject* given) {
        dlpack::Tensor t{};
        if (finder_.read(given, &t) != 0) {  // a dtype without a code, or no memory of its own
            PyErr_Clear();
            return Outcome::unknown;
        }
        if (t.ndim < 0 || t.ndim > max_ndim || t.device.type < 0 || t.device.type > 255 || t.device.id < 0 ||
            t.device.id > 255 || (t.ndim > 0 && (!t.shape || !t.strides)))
            return Outcome::unknown;
        if (words_used_ + 2 + 2 * t.ndim > max_words) return Outcome::unknown;
        // What no DLTensor tells: a view of a complex tensor's part may stand for the negated contents of its memory.
        if (t.dtype.code == dlpack::floating) {
            PyObject* negated = PyObject_CallMethodNoArgs(given, is_neg_name);
            Py_XDECREF(negated);
            if (negated != Py_False) {
                PyErr_Clear();
                return Outcome::unknown;
            }
        }
        const auto u64 = [](auto v) { return static_cast<std::uint64_t>(v); };
        word(tensor_tag | u64(t.ndim) << 8 | u64(t.dtype.code) << 16 | u64(t.dtype.bits) << 24 |
             u64(t.dtype.lanes) << 32 | u64(t.device.type) << 48 | u64(t.device.id) << 56);
        word(reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset);
        std::memcpy(words_ + words_used_, t.shape, t.ndim * sizeof(std::int64_t));
        std::memcpy(words_ + words_used_ + t.ndim, t.strides, t.ndim * sizeof(std::int64_t));
        words_used_ += 2 * t.ndim;
        return Outcome::fine;
    }

    const Finder& finder_;
    PyObject* values_ = nullptr;
    Py_ssize_t count_ = 0;
    std::size_t words_used_ = 0;
    PyObject* parts_[max_parts];
    std::uint64_t words_[max_words];
};

// Launches what `warm` has for `key`.  Takes `key`, and gives it back if there is nothing or a scalar does not fit.
PyObject* launch(PyObject* warm, PyObject* key, PyObject* values) {
    if (!key) return nullptr;
    PyObject* packed = PyDict_GetItemWithError(warm, key);
    if (!packed) {
        if (!PyErr_Occurred()) return key;
        Py_DECREF(key);
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return nullptr;
        PyErr_Clear();  // a constexpr that cannot be hashed, which the long way refuses
        Py_RETURN_NONE;
    }
    Py_INCREF(packed);  // the launch may empty the table
    PyObject* call[] = {packed, values};
    PyObject* done = PyObject_VectorcallMethod(submit_name, call, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    Py_DECREF(packed);
    if (done == Py_False) {
        Py_DECREF(done);
        return key;
    }
    Py_DECREF(key);
    return done;  // True, or null
}

PyObject* find(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    const auto* finder = static_cast<Finder*>(PyCapsule_GetPointer(self, finder_name));
    if (!finder) return nullptr;
    if (count != 5 || !PyDict_CheckExact(args[1]) || !PyTuple_CheckExact(args[3]) || !PyDict_CheckExact(args[4])) {
        PyErr_SetString(PyExc_TypeError, "find(kernel, warm, sms, args, kwargs)");
        return nullptr;
    }
    Call call(*finder);
    Outcome o = call.start(args[0], args[2]);
    if (o == Outcome::fine) o = call.positional(args[3]);
    if (o == Outcome::fine && PyDict_GET_SIZE(args[4])) o = call.named(args[4]);
    if (o == Outcome::fine) return launch(args[1], call.key(), call.values());
    return o == Outcome::error ? nullptr : PyObject_Vectorcall(finder->fallback, args, count, nullptr);
}

PyMethodDef find_method = {"find", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(find)), METH_FASTCALL,
                           "find(kernel, warm, sms, args, kwargs) -> True, key or None"};

void drop(PyObject* capsule) { delete static_cast<Finder*>(PyCapsule_GetPointer(capsule, finder_name)); }

// Of a tensor type; null, without an exception, if it has none that pk understands.
decltype(Finder::read) reader(PyObject* type) {
    PyObject* held = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    void* table = held && PyCapsule_CheckExact(held) ? PyCapsule_GetPointer(held, dlpack::capsule) : nullptr;
    Py_XDECREF(held);  // the type keeps it
    PyErr_Clear();
    auto* header = static_cast<dlpack::Header*>(table);
    while (header && header->major != dlpack::major_version) header = header->previous;
    return header ? reinterpret_cast<dlpack::ExchangeApi*>(header)->tensor_from_py_object_no_sync : nullptr;
}

// False, with an exception set, for what `finder` cannot work with.
bool positions(Finder& finder, PyObject* order) {
    const Py_ssize_t scalars = PyTuple_GET_SIZE(finder.defaults);
    std::memset(finder.position, -1, sizeof finder.position);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(order); ++i) {
        PyObject* index = PyDict_GetItemWithError(finder.scalars, PyTuple_GET_ITEM(order, i));
        if (!index && PyErr_Occurred()) return false;
        const long at = index ? PyLong_AsLong(index) : -1;
        if (index && (at < 0 || at >= scalars)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a scalar without a default");
            return false;
        }
        if (i < max_parts) finder.position[i] = static_cast<signed char>(at);
    }
    return true;
}

PyObject* make(PyObject*, PyObject* args) {
    PyObject *types, *base, *environment, *variables, *order, *scalars, *defaults, *fallback;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!O:finder", &PyTuple_Type, &types, &PyType_Type, &base, &PyDict_Type,
                          &environment, &PyTuple_Type, &variables, &PyTuple_Type, &order, &PyDict_Type, &scalars,
                          &PyTuple_Type, &defaults, &fallback))
        return nullptr;
    if (PyTuple_GET_SIZE(types) < 1 || PyTuple_GET_SIZE(types) > max_types ||
        PyTuple_GET_SIZE(variables) > max_variables || PyTuple_GET_SIZE(order) > max_parts)
        Py_RETURN_NONE;
    decltype(Finder::read) read = nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
        const auto here = reader(PyTuple_GET_ITEM(types, i));
        if (!here || (read && here != read)) Py_RETURN_NONE;
        read = here;
    }
    if (!submit_name && !(submit_name = PyUnicode_InternFromString("submit"))) return nullptr;
    if (!is_neg_name && !(is_neg_name = PyUnicode_InternFromString("is_neg"))) return nullptr;
    auto* finder = new (std::nothrow) Finder;
    if (!finder) return PyErr_NoMemory();
    finder->read = read;
    finder->types = Py_NewRef(types);
    finder->base = Py_NewRef(base);
    finder->environment = Py_NewRef(environment);
    finder->variables = Py_NewRef(variables);
    finder->scalars = Py_NewRef(scalars);
    finder->defaults = Py_NewRef(defaults);
    finder->fallback = Py_NewRef(fallback);
    PyObject* capsule = PyCapsule_New(finder, finder_name, drop);
    if (!capsule) delete finder;
    if (!capsule) return nullptr;
    PyObject* made = positions(*finder, order) ? PyCFunction_New(&find_method, capsule) : nullptr;
    Py_DECREF(capsule);
    return made;
}

PyObject* unchanged(PyObject*, PyObject* watched) {
    if (!PyTuple_Check(watched)) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watched); ++i) {
        PyObject *entry = PyTuple_GET_ITEM(watched, i);
        if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != 3 || !PyDict_Check(PyTuple_GET_ITEM(entry, 0)))
            Py_RETURN_FALSE;
        PyObject* now = PyDict_GetItemWithError(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1));
        if (!now && PyErr_Occurred()) return nullptr;
        if (now != PyTuple_GET_ITEM(entry, 2)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

}  // namespace

PyMethodDef unchanged_method = {"unchanged", unchanged, METH_O,
                                "unchanged(entries): whether space[name] is value in all (space, name, value)"};

PyMethodDef finder_method = {
    "finder", make, METH_VARARGS,
    "finder(tensor_types, base_type, environment, variables, names, scalars, defaults, fallback)"};

}  // namespace pk
