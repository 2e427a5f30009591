# The layers that need PyTorch, in one shared library: it registers the operators when it is loaded, and C++ users link it.
add_library(
  deepcompile SHARED
  comm/c10d_communicator.cpp
  comm/communicator.cpp
  comm/inference_group.cpp
  comm/interpreter.cpp
  comm/ordered_sum.cpp
  comm/roll_call.cpp
  comm/shared_placement.cpp
  comm/shared_tensor.cpp
  comm/shm_backend.cpp
  comm/shm_backend_gathers.cpp
  comm/shm_backend_messages.cpp
  comm/shm_backend_moves.cpp
  comm/shm_backend_reductions.cpp
  comm/shm_communicator.cpp
  comm/shm_rendezvous.cpp
  comm/shm_tensors.cpp
  comm/shm_work.cpp
  ops/autograd.cpp
  ops/devices.cpp
  ops/functionalize.cpp
  ops/inference_all_reduce.cpp
  ops/kernels.cpp
  ops/meta.cpp
  ops/schemas.cpp
  runtime/agreement.cpp
  runtime/buffer_pool.cpp
  runtime/device_kernels.cpp
  runtime/device_stream.cpp
  runtime/executor.cpp
  runtime/follower.cpp
  runtime/gathered.cpp
  runtime/gradient_order.cpp
  runtime/gradient_presence.cpp
  runtime/gradient_reducer.cpp
  runtime/gradient_reductions.cpp
  runtime/gradient_settling.cpp
  runtime/graph_members.cpp
  runtime/graph_table.cpp
  runtime/host_copies.cpp
  runtime/host_memory.cpp
  runtime/host_moves.cpp
  runtime/local_gradients.cpp
  runtime/param.cpp
  runtime/parameter_copies.cpp
  runtime/parameter_gatherer.cpp
  runtime/parameter_misuse.cpp
  runtime/parameter_passes.cpp
  runtime/parameter_reads.cpp
  runtime/raw_tensor.cpp
  runtime/reduce_bucket.cpp
  runtime/reduction_order.cpp
  runtime/registry.cpp
  runtime/runtime.cpp
  runtime/scheduled_reads.cpp
  runtime/shards_in_place.cpp
  runtime/state_offload.cpp
  runtime/step_trace.cpp
  runtime/stream.cpp
  runtime/tensor_offload.cpp
  runtime/tensor_text.cpp
  runtime/unsettled.cpp
  runtime/watchdog.cpp
  runtime/z3_executor.cpp)
# As objects, not as archives: what others call of them must be seen (see --exclude-libs).
target_sources(deepcompile PRIVATE $<TARGET_OBJECTS:dc_base> $<TARGET_OBJECTS:dc_shm>)
target_link_libraries(deepcompile PRIVATE dc_flags Highway::hwy Threads::Threads PUBLIC PythonTorch::torch)
target_precompile_headers(deepcompile PRIVATE torch_headers.h)
# GCC 13 sees writes out of bounds in libstdc++'s vector<bool>, which PyTorch's custom functions use.
set_source_files_properties(ops/autograd.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON COMPILE_OPTIONS
                            "$<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds;-Wno-stringop-overflow>")

# The Python module: one small file per subject.
Python_add_library(_C MODULE WITH_SOABI bindings/module.cpp bindings/direct_calls.cpp bindings/inference_call.cpp
                   bindings/runtime.cpp bindings/saved_tensors.cpp bindings/schedule.cpp bindings/shm.cpp
                   bindings/state_offload.cpp bindings/step_trace.cpp)
target_link_libraries(_C PRIVATE dc_flags deepcompile PythonTorch::torch_python)
target_compile_definitions(_C PRIVATE TORCH_EXTENSION_NAME=_C)
target_precompile_headers(_C PRIVATE bindings/python_headers.h)

if(DEEPCOMPILE_JOINED)
  # Every source begins with PyTorch's headers, precompiled or not: most of the time goes there. What is left out has names in
  # its unnamed namespaces that another source has, too.
  set_target_properties(deepcompile PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  set_target_properties(_C PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 4)
  set_source_files_properties(comm/shm_tensors.cpp ops/functionalize.cpp ops/meta.cpp
                              PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endif()

include(cuda_parts.cmake)

# In place the libraries lie where the installed package has them. Relative run paths, so that the package can be moved;
# torch's libraries are in the process already when the module is loaded.
set_target_properties(deepcompile PROPERTIES INSTALL_RPATH "$ORIGIN")
set_target_properties(_C PROPERTIES INSTALL_RPATH "$ORIGIN/lib")
if(DEEPCOMPILE_IN_PLACE)
  set(package "${CMAKE_SOURCE_DIR}/python/deepcompile")
  set_target_properties(_C PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${package}")
  set_target_properties(deepcompile PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${package}/lib")
endif()

# What the package says where it meets another PyTorch than that of its build.
file(WRITE "${CMAKE_BINARY_DIR}/_built_for.py" "TORCH = \"${PythonTorch_VERSION}\"\n")
if(DEEPCOMPILE_IN_PLACE)
  file(COPY "${CMAKE_BINARY_DIR}/_built_for.py" DESTINATION "${package}")
endif()
install(FILES "${CMAKE_BINARY_DIR}/_built_for.py" DESTINATION .)

# What the package needs to run.
add_custom_target(libraries DEPENDS _C _plan)
if(TARGET _cuda)
  add_dependencies(libraries _cuda)
endif()

include(CMakePackageConfigHelpers)
set(cmake_files "share/cmake/deepcompile")
configure_package_config_file("${CMAKE_SOURCE_DIR}/cmake/deepcompileConfig.cmake.in"
                              "${CMAKE_BINARY_DIR}/deepcompileConfig.cmake" INSTALL_DESTINATION "${cmake_files}")
write_basic_package_version_file("${CMAKE_BINARY_DIR}/deepcompileConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(TARGETS _C LIBRARY DESTINATION .)
install(TARGETS deepcompile LIBRARY DESTINATION lib)
install(DIRECTORY base comm runtime shm DESTINATION include/deepcompile FILES_MATCHING PATTERN "*.h")
install(FILES deepcompile.h DESTINATION include/deepcompile)
install(FILES "${CMAKE_BINARY_DIR}/deepcompileConfig.cmake" "${CMAKE_BINARY_DIR}/deepcompileConfigVersion.cmake"
              "${CMAKE_SOURCE_DIR}/cmake/FindPythonTorch.cmake" DESTINATION "${cmake_files}")
