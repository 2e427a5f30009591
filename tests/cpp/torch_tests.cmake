# Tests of the layers that need PyTorch. Ranks are threads of one process (support/thread_communicator.h).
dc_test_by_file(
  torch_tests
  deepcompile
  comm/communicator_test.cpp
  comm/ordered_sum_test.cpp
  runtime/agreement_test.cpp
  runtime/buffer_pool_test.cpp
  runtime/executor_accumulation_test.cpp
  runtime/executor_failure_test.cpp
  runtime/executor_order_test.cpp
  runtime/executor_test.cpp
  runtime/gathered_test.cpp
  runtime/host_moves_test.cpp
  runtime/ids_test.cpp
  runtime/param_test.cpp
  runtime/step_trace_test.cpp
  runtime/reduce_bucket_test.cpp
  runtime/reduction_order_test.cpp
  runtime/registry_test.cpp
  runtime/follower_test.cpp
  runtime/state_offload_test.cpp
  runtime/stream_test.cpp
  runtime/tensor_offload_test.cpp
  runtime/tensor_text_test.cpp
  runtime/watchdog_test.cpp
  runtime/z1_executor_test.cpp
  runtime/z3_executor_failure_test.cpp
  runtime/z3_executor_schedule_test.cpp
  runtime/z3_executor_test.cpp)
target_link_libraries(torch_tests PRIVATE dc_flags)
target_include_directories(torch_tests PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_precompile_headers(torch_tests PRIVATE <ATen/Functions.h> <gtest/gtest.h> support/ranks.h)
target_compile_options(torch_tests PRIVATE -O1) # quick to build; what is tested is built as it is shipped
