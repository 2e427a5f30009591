# Finds PyTorch through the Python interpreter, so that the package that is imported is the package that is linked.
#
# Needs Python_EXECUTABLE. Defines the imported targets
#   PythonTorch::torch          ATen, c10 and c10d
#   PythonTorch::torch_python   the above with the Python bindings of PyTorch (and its copy of pybind11)
# and PythonTorch_VERSION, PythonTorch_CUDA (the CUDA version PyTorch was built for, or empty).
#
# PyTorch's own package file is not used: it looks for CUDA, NCCL and MKL even where nothing of them is needed.

# Second with -I, which sees the interpreter's own packages where pip has hidden them from an isolated build.
foreach(_isolated "" -I)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" ${_isolated} -c
            "import os, torch; print(torch.__version__); print(os.path.dirname(torch.__file__)); print(torch.version.cuda or '')"
    OUTPUT_VARIABLE _torch_facts
    RESULT_VARIABLE _torch_status
    ERROR_VARIABLE _torch_error
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(_torch_status EQUAL 0)
    break()
  endif()
endforeach()

if(_torch_status EQUAL 0)
  string(REPLACE "\n" ";" _torch_facts "${_torch_facts};")
  list(GET _torch_facts 0 PythonTorch_VERSION)
  list(GET _torch_facts 1 PythonTorch_ROOT)
  list(GET _torch_facts 2 PythonTorch_CUDA)
else()
  message(STATUS "${Python_EXECUTABLE} cannot import torch: ${_torch_error}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PythonTorch REQUIRED_VARS PythonTorch_ROOT VERSION_VAR PythonTorch_VERSION)

if(PythonTorch_FOUND AND NOT TARGET PythonTorch::torch)
  add_library(PythonTorch::torch INTERFACE IMPORTED)
  target_include_directories(PythonTorch::torch SYSTEM INTERFACE "${PythonTorch_ROOT}/include"
                             "${PythonTorch_ROOT}/include/torch/csrc/api/include")
  target_link_directories(PythonTorch::torch INTERFACE "${PythonTorch_ROOT}/lib")
  target_link_libraries(PythonTorch::torch INTERFACE torch_cpu torch c10)

  add_library(PythonTorch::torch_python INTERFACE IMPORTED)
  target_link_libraries(PythonTorch::torch_python INTERFACE PythonTorch::torch torch_python)
endif()
