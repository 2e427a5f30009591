dc_test_by_file(shm_tests dc_shm shm/collectives_test.cpp shm/group_failure_test.cpp shm/handshake_test.cpp shm/point_to_point_test.cpp shm/reduce_kernels_test.cpp
  shm/segment_test.cpp shm/shared_heap_test.cpp shm/slot_area_test.cpp)
target_include_directories(shm_tests PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/shm")
