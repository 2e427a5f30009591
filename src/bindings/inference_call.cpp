// deepcompile.comm.inference_all_reduce: what torch.ops.deepspeed.inference_all_reduce_ does, without the way through
// torch.ops, which takes longer than the sum of a short tensor. Takes the short way only where the operator would do
// nothing but call its CPU kernel; everything else is left to a function of Python's, which calls the operator.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "deepcompile/bindings/bindings.h"
#include "deepcompile/comm/inference_group.h"
#include "deepcompile/shm/wait.h"

namespace dc {
namespace {

namespace py = pybind11;
using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr std::size_t kShortBytes = 64 << 10;  // what is reduced in less time than another thread needs to wake up

// Under the interpreter's lock. Owned, for the life of the process.
struct State {
  PyObject* otherwise = nullptr;  // the function of Python's
  PyObject* holder = nullptr;     // of the process group of now,
  PyObject* attribute = nullptr;  // under this name
  // The process group that the ranks belong to, compared but never used; None where they belong to none; null where
  // there are no ranks.
  PyObject* owner = nullptr;
};
State state;

// Whether the ranks still belong to the process group of now.
bool current() {
  if (state.owner == nullptr || state.owner == Py_None) {
    return state.owner != nullptr;
  }
  PyObject* now = PyObject_GetAttr(state.holder, state.attribute);
  if (now == nullptr) {
    PyErr_Clear();
    return false;
  }
  Py_DECREF(now);  // somebody else holds it, or it is another one
  return now == state.owner;
}

// Whether the operator would come to its CPU kernel, and nobody would see the call on its way: no subclass, mode,
// transformation, tracer, autograd or profiler.
bool isSeenByNobody(const at::Tensor& tensor) {
  constexpr DispatchKeySet kDense(
      {DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU, DispatchKey::ADInplaceOrView});
  const auto keys = tensor.key_set().raw_repr() & ~kDense.raw_repr();
  const auto modes =
      c10::impl::tls_local_dispatch_key_set().included_.raw_repr() & ~c10::default_included_set.raw_repr();
  return keys == 0 && modes == 0 && !tensor.requires_grad() && !at::impl::torch_function_mode_enabled() &&
         !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

// Lets go of the interpreter: at once, or when a wait turns out to be long.
class Interpreter {
 public:
  explicit Interpreter(bool at_once) : long_wait_(&Interpreter::release, this) {
    if (at_once) {
      release(this);
    }
  }
  ~Interpreter() {
    if (saved_ != nullptr) {
      PyEval_RestoreThread(saved_);
    }
  }
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

 private:
  static void release(void* self) {
    auto& saved = static_cast<Interpreter*>(self)->saved_;
    if (saved == nullptr) {
      saved = PyEval_SaveThread();
    }
  }
  PyThreadState* saved_ = nullptr;
  const shm::LongWait long_wait_;
};

// False where it is not ours to do.
bool reduceDirectly(PyObject* object) {
  if (!THPVariable_CheckExact(object) || !current()) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!isSeenByNobody(tensor) || !tensor.is_contiguous()) {
    return false;
  }
  const InferenceCall call;
  if (call.group() == nullptr) {
    return false;
  }
  const at::Tensor kept = tensor;  // another thread may let go of the last reference meanwhile
  const Interpreter interpreter(kept.nbytes() > kShortBytes);
  return call.group()->allReduceInPlace(kept);
}

PyObject* inferenceAllReduce(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  if (count == 1 && names == nullptr) {
    try {
      if (reduceDirectly(arguments[0])) {
        return Py_NewRef(arguments[0]);
      }
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
  }
  return PyObject_Vectorcall(state.otherwise, arguments, static_cast<std::size_t>(count), names);
}

PyMethodDef method = {
    "inference_all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&inferenceAllReduce)),
    METH_FASTCALL | METH_KEYWORDS,
    "inference_all_reduce(tensor, op=None, group=None)\n--\n\n"
    "Sums a CPU tensor over all ranks, in place, through shared memory where they share a host; returns the tensor. "
    "Another ``op`` or ``group`` is served by torch.distributed."};

}  // namespace

void bindInferenceCall(py::module_& module) {
  PyObject* name = PyUnicode_FromString("deepcompile.comm");
  module.attr("inference_all_reduce") = py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, nullptr, name));
  Py_DECREF(name);
  module.def(
      "set_inference_fallback",
      [](const py::object& otherwise, const py::object& holder, const std::string& attribute) {
        state.otherwise = py::object(otherwise).release().ptr();
        state.holder = py::object(holder).release().ptr();
        state.attribute = PyUnicode_InternFromString(attribute.c_str());
      },
      py::arg("otherwise"), py::arg("holder"), py::arg("attribute"),
      "What serves the calls that cannot be served directly; and where the process group of now is found.");
  module.def(
      "set_inference_owner", [](const py::object& owner) { state.owner = owner.ptr(); }, py::arg("owner"),
      "The process group to which the ranks belong, which is not kept alive; or None.");
  module.def("clear_inference_owner", [] { state.owner = nullptr; });
}

}  // namespace dc
