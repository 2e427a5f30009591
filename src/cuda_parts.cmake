# What needs CUDA: the module _cuda, built where there is a CUDA toolkit and a PyTorch with CUDA. Where PyTorch has no CUDA the
# sources are compiled all the same beside the tests, so that a machine without a GPU notices when they break; nothing is linked
# then.
if(NOT DEEPCOMPILE_CUDA OR NOT (PythonTorch_CUDA OR DEEPCOMPILE_TESTS))
  message(STATUS "The CUDA parts are left out")
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "No CUDA compiler: the CUDA parts are left out")
  return()
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90)
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)  # CMake does not know later ones for every CUDA compiler; the kernels need no more
find_package(CUDAToolkit REQUIRED)

set(cuda_sources
    bindings/cuda.cpp
    comm/nccl_api.cpp
    comm/nccl_communicator_cuda.cpp
    comm/nccl_memory_cuda.cpp
    comm/symmetric_communicator_cuda.cpp
    comm/symmetric_heap_cuda.cpp
    comm/symmetric_reductions_cuda.cpp
    comm/symmetric_staging_cuda.cpp
    comm/copy_kernels_cuda.cu
    comm/rank_sum_kernels_cuda.cu
    comm/sum_kernels_cuda.cu
    runtime/register_kernels_cuda.cpp)
if(PythonTorch_CUDA)
  Python_add_library(_cuda MODULE WITH_SOABI ${cuda_sources})
  target_link_libraries(_cuda PRIVATE deepcompile PythonTorch::torch_python c10_cuda CUDA::cudart)
  set_target_properties(_cuda PROPERTIES INSTALL_RPATH "$ORIGIN/lib")
  if(DEEPCOMPILE_IN_PLACE)
    set_target_properties(_cuda PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_SOURCE_DIR}/python/deepcompile")
  endif()
  install(TARGETS _cuda LIBRARY DESTINATION .)
  set(cuda_target _cuda)
else()
  message(STATUS "PyTorch without CUDA: the CUDA parts are compiled, not linked")
  add_library(cuda_parts_compile OBJECT ${cuda_sources})
  # Stands in for a header that only PyTorch's CUDA packages have.
  target_compile_definitions(cuda_parts_compile PRIVATE C10_CUDA_NO_CMAKE_CONFIGURE_FILE)
  target_include_directories(cuda_parts_compile SYSTEM PRIVATE ${Python_INCLUDE_DIRS})
  target_link_libraries(cuda_parts_compile PRIVATE PythonTorch::torch_python CUDA::cudart)
  # Nobody runs them: the quickest way to a verdict.
  target_compile_options(cuda_parts_compile PRIVATE -O0)
  set_target_properties(cuda_parts_compile PROPERTIES CUDA_ARCHITECTURES 90 UNITY_BUILD ${DEEPCOMPILE_JOINED}
                                                     UNITY_BUILD_BATCH_SIZE 5)
  set(cuda_target cuda_parts_compile)
endif()
target_link_libraries(${cuda_target} PRIVATE dc_flags)
target_compile_definitions(${cuda_target} PRIVATE TORCH_EXTENSION_NAME=_cuda)
