// A short way from Python to our operators. PyTorch's general one turns every argument into an IValue as the schema
// says and takes three times as long as what most of our operators do on the host. Here exact tensors, numbers and
// lists of them go to the dispatcher as they are; it sees the same call, so modes, profilers and autograd do. What is
// anything else (a subclass, a symbolic number, a keyword, a mode of torch functions but the default device) takes the
// general way.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/bindings/bindings.h"
#include "deepcompile/comm/interpreter.h"

namespace dc {
namespace {

namespace py = pybind11;

// The class of sharded parameters, which is no other to operators than PyTorch's own. Owned, for the life of the
// process.
PyTypeObject* shard_parameter_type = nullptr;

// read() is false where the object is not of the exact type.

bool read(PyObject* object, at::Tensor& value) {
  if (!THPVariable_CheckExact(object) && Py_TYPE(object) != shard_parameter_type) {
    return false;
  }
  value = THPVariable_Unpack(object);
  return true;
}

bool read(PyObject* object, std::int64_t& value) {
  if (!PyLong_CheckExact(object)) {
    return false;
  }
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool read(PyObject* object, bool& value) {
  value = object == Py_True;
  return value || object == Py_False;
}

bool read(PyObject* object, at::ScalarType& value) {
  if (!THPDtype_Check(object)) {
    return false;
  }
  value = reinterpret_cast<THPDtype*>(object)->scalar_type;
  return true;
}

template <typename T>
bool read(PyObject* object, std::vector<T>& values) {
  const bool list = PyList_CheckExact(object) != 0;
  if (!list && !PyTuple_Check(object)) {  // torch.Size is one
    return false;
  }
  const Py_ssize_t count = list ? PyList_GET_SIZE(object) : PyTuple_GET_SIZE(object);
  values.resize(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const one = list ? PyList_GET_ITEM(object, i) : PyTuple_GET_ITEM(object, i);
    if (!read(one, values[static_cast<std::size_t>(i)])) {
      return false;
    }
  }
  return true;
}

template <typename T>
bool read(PyObject* object, std::optional<T>& value) {
  return object == Py_None || read(object, value.emplace());
}

PyObject* wrap(at::Tensor tensor) { return THPVariable_Wrap(std::move(tensor)); }

PyObject* wrap(std::vector<at::Tensor> tensors) {
  py::list list(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    list[i] = py::reinterpret_steal<py::object>(wrap(std::move(tensors[i])));
  }
  return list.release().ptr();
}

// What an argument is kept as during the call: it owns what it refers to, because the interpreter is let go.
template <typename T>
struct Kept {
  using type = std::remove_cvref_t<T>;
};
template <typename T>
struct Kept<c10::ArrayRef<T>> {
  using type = std::vector<T>;
};

// Lets go of the interpreter. (pybind11's does more than is needed where no thread ends.)
class Released {
 public:
  Released() : thread_(PyEval_SaveThread()) {}
  ~Released() { PyEval_RestoreThread(thread_); }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  PyThreadState* const thread_;
};

// Null where this thread does not hold the interpreter. (PyGILState_Check says nothing where there are
// subinterpreters.)
PyThreadState* heldState() {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked();
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet();
#else
  // Here that is the state of whichever thread holds it, which another thread may be about to free: looked into only
  // where there are subinterpreters, of which a thread has other states than its first.
  PyThreadState* const current = _PyThreadState_UncheckedGet();
  if (current == nullptr || current == PyGILState_GetThisThreadState()) {
    return current;
  }
  const bool several = PyInterpreterState_Next(PyInterpreterState_Head()) != nullptr;
  return several && current->thread_id == PyThread_get_thread_ident() ? current : nullptr;
#endif
}

constexpr Interpreter kInterpreter = {
    [] {
      return static_cast<void*>(Py_IsInitialized() != 0 && heldState() != nullptr ? PyEval_SaveThread() : nullptr);
    },
    [](void* thread) { PyEval_RestoreThread(static_cast<PyThreadState*>(thread)); },
};

// Whether the operator is called with the interpreter: kernels that may wait for more than a lock are not, the others
// let go of it themselves where they find that they must.
enum class With { TheInterpreter, NoInterpreter };

// torch.utils._device.DeviceContext, which set_default_device leaves on: it looks at functions that make tensors, and
// our operators are none of them. Owned, for the life of the process.
PyTypeObject* default_device_mode = nullptr;

// Whether a mode of torch functions wants to see the call.
bool isWatched() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) {
    return false;
  }
  for (std::int64_t i = 0; i < Modes::stack_len(); ++i) {
    if (Py_TYPE(Modes::get_stack_at(i)->ptr(getPyInterpreter())) != default_device_mode) {
      return true;
    }
  }
  return false;
}

// The short way of one operator. Lives as long as the process.
class DirectCall {
 public:
  virtual ~DirectCall() = default;
  virtual PyObject* call(PyObject* const* arguments, std::size_t count) = 0;  // null without an error: not ours to do

  explicit DirectCall(PyObject* general) : general_(general) {}
  DirectCall(const DirectCall&) = delete;
  DirectCall& operator=(const DirectCall&) = delete;

  // Of the function that stands for the operator.
  static PyObject* entry(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
    return of(self).serve(arguments, static_cast<std::size_t>(count), names);
  }

  // Of an instance of a class that has that function as __call__.
  static PyObject* entryOfInstance(PyObject* self, PyObject* arguments, PyObject* names) {
    const auto found = byType().find(Py_TYPE(self));
    if (found == byType().end() || names != nullptr) {  // of a class derived from such a one, or with keywords
      const auto function = py::reinterpret_steal<py::object>(PyObject_GetAttrString(self, "_op"));
      return function ? PyObject_Call(function.ptr(), arguments, names) : nullptr;
    }
    return found->second->serve(&PyTuple_GET_ITEM(arguments, 0), static_cast<std::size_t>(PyTuple_GET_SIZE(arguments)),
                                nullptr);
  }

  // Python would look __call__ up in the class at every call. `function`: one that directCall made.
  static void callInstancesDirectly(PyTypeObject* type, PyObject* function) {
    byType()[type] = &of(PyCFunction_GET_SELF(Py_NewRef(function)));
    Py_INCREF(type);
    type->tp_call = &entryOfInstance;
    PyType_Modified(type);
  }

 private:
  static DirectCall& of(PyObject* capsule) { return *static_cast<DirectCall*>(PyCapsule_GetPointer(capsule, nullptr)); }

  // The types are owned. Python's lock guards it.
  static std::unordered_map<PyTypeObject*, DirectCall*>& byType() {
    static std::unordered_map<PyTypeObject*, DirectCall*> all;
    return all;
  }

  PyObject* serve(PyObject* const* arguments, std::size_t count, PyObject* names) {
    if (names == nullptr && !isWatched()) {
      HANDLE_TH_ERRORS
      if (PyObject* result = call(arguments, count); result != nullptr) {
        return result;
      }
      END_HANDLE_TH_ERRORS
      if (PyErr_Occurred() != nullptr) {
        return nullptr;
      }
    }
    return PyObject_Vectorcall(general_, arguments, count, names);
  }

  PyObject* const general_;  // owned
};

template <typename Signature>
class TypedCall;

template <typename Result, typename... Arguments>
class TypedCall<Result(Arguments...)> final : public DirectCall {
 public:
  // The defaults of arguments that have one are all zero, false or None (test_direct_calls.py).
  TypedCall(PyObject* general, const std::string& name, With with)
      : DirectCall(general),
        with_(with),
        operator_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Result(Arguments...)>()) {
    for (const c10::Argument& argument : operator_.schema().arguments()) {
      required_ += argument.default_value().has_value() ? 0 : 1;
    }
  }

  PyObject* call(PyObject* const* arguments, std::size_t count) override {
    if (count < required_ || count > sizeof...(Arguments)) {
      return nullptr;
    }
    std::tuple<typename Kept<Arguments>::type...> values{};
    if (!readAll(values, arguments, count, std::index_sequence_for<Arguments...>())) {
      return nullptr;
    }
    const auto run = [&](auto&... kept) -> Result {
      std::optional<Released> others_run;
      if (with_ == With::NoInterpreter) {
        others_run.emplace();
      }
      return operator_.call(kept...);
    };
    if constexpr (std::is_void_v<Result>) {
      std::apply(run, values);
      return Py_NewRef(Py_None);
    } else {
      return wrap(std::apply(run, values));
    }
  }

 private:
  template <typename Values, std::size_t... kIndex>
  static bool readAll(Values& values, PyObject* const* arguments, std::size_t count, std::index_sequence<kIndex...>) {
    return ((kIndex >= count || read(arguments[kIndex], std::get<kIndex>(values))) && ...);
  }

  const With with_;
  const c10::TypedOperatorHandle<Result(Arguments...)> operator_;
  std::size_t required_ = 0;  // arguments without a default, which come first
};

using at::Tensor;
using std::int64_t;
using Dtype = std::optional<at::ScalarType>;

struct Operator {
  const char* name;
  std::unique_ptr<DirectCall> (*make)(PyObject* general, const std::string& name, With with);
  With with = With::NoInterpreter;
};

template <typename Signature>
std::unique_ptr<DirectCall> make(PyObject* general, const std::string& name, With with) {
  return std::make_unique<TypedCall<Signature>>(general, name, with);
}

// Those that a step calls once a parameter or more often, as in ops/schemas.cpp.
constexpr Operator kOperators[] = {
    {"dc::allgather_param", make<Tensor(const Tensor&, int64_t, int64_t, Dtype)>},
    {"dc::prefetch_params_fused",
     make<void(int64_t, at::TensorList, at::IntArrayRef, const std::optional<std::vector<at::ScalarType>>&)>},
    {"dc::wait_allgather", make<Tensor(const Tensor&, int64_t, int64_t)>, With::TheInterpreter},
    {"dc::release_param", make<Tensor(const Tensor&, int64_t, int64_t, int64_t)>, With::TheInterpreter},
    {"dc::release_param_traced", make<Tensor(const Tensor&, int64_t, int64_t, int64_t)>, With::TheInterpreter},
    {"dc::reduce_grad", make<Tensor(const Tensor&, int64_t, int64_t)>},
    {"dc::gather_shard", make<Tensor(const Tensor&, int64_t, at::IntArrayRef, Dtype, bool, int64_t)>},
    {"dc::gather_shards", make<std::vector<Tensor>(at::TensorList, int64_t, at::IntArrayRef, at::IntArrayRef)>},
    {"dc::prefetch_shards", make<void(at::TensorList, int64_t, const std::vector<at::ScalarType>&)>},
    {"dc::reduce_shard", make<Tensor(const Tensor&, const Tensor&, int64_t, bool)>},
    {"dc::reduce_shards", make<void(at::TensorList, at::TensorList, int64_t, at::IntArrayRef)>},
    {"deepspeed::inference_all_reduce", make<Tensor(const Tensor&)>},
    {"deepspeed::inference_all_reduce_", make<Tensor&(Tensor&)>},
};

// A function that serves a call of the operator directly where it can, else by `general`.
py::object directCall(const std::string& name, const py::object& general) {
  static PyMethodDef method = {"direct_call",
                               reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&DirectCall::entry)),
                               METH_FASTCALL | METH_KEYWORDS, nullptr};
  for (const Operator& one : kOperators) {
    if (name == one.name) {
      auto direct = one.make(py::object(general).release().ptr(), name, one.with);
      const auto self = py::reinterpret_steal<py::object>(PyCapsule_New(direct.get(), nullptr, nullptr));
      direct.release();  // never deleted: operators are called until the interpreter has ended
      return py::reinterpret_steal<py::object>(
          PyCFunction_NewEx(&method, self.ptr(), py::object(general.attr("__module__")).ptr()));
    }
  }
  throw py::value_error("no operator " + name + " is called directly");
}

}  // namespace

void bindDirectCalls(py::module_& module) {
  setInterpreter(kInterpreter);
  module.def("direct_operators", [] {
    std::vector<std::string> names;
    for (const Operator& one : kOperators) {
      names.emplace_back(one.name);
    }
    return names;
  });
  module.def("direct_call", &directCall, py::arg("name"), py::arg("general"));
  module.def(
      "call_instances_directly",
      [](const py::type& type, const py::object& function) {
        DirectCall::callInstancesDirectly(reinterpret_cast<PyTypeObject*>(type.ptr()), function.ptr());
      },
      py::arg("type"), py::arg("function"), "Calls of the type's instances go straight to what direct_call returned.");
  module.def(
      "take_for_parameters",
      [](const py::type& type) {
        shard_parameter_type = reinterpret_cast<PyTypeObject*>(py::object(type).release().ptr());
      },
      py::arg("type"), "Operators are called directly with objects of this class, too.");
  module.def(
      "set_default_device_mode",
      [](const py::type& mode) {
        default_device_mode = reinterpret_cast<PyTypeObject*>(py::object(mode).release().ptr());
      },
      py::arg("mode"), "The mode of torch functions that lets our operators pass.");
}

}  // namespace dc
