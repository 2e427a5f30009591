# Finds Highway (SIMD with a choice at run time) and defines the target Highway::hwy. In this order:
#
#   $HWY_ROOT   with include/hwy and lib: a build of one's own, for machines without a network
#   the system  Debian: libhwy-dev. Not for a wheel, which must not need a library that its user may not have
#   the index   sources, fetched once into the build folder (fetch_highway.py) and linked in
#
# A wheel (DEEPCOMPILE_HIGHWAY_INSIDE) takes from HWY_ROOT the archive alone (libhwy.a); where there is none, the index's sources.
set(_here "${CMAKE_CURRENT_LIST_DIR}")
add_library(Highway::hwy INTERFACE IMPORTED)

if(DEFINED ENV{HWY_ROOT})
  set(_names hwy)
  if(DEEPCOMPILE_HIGHWAY_INSIDE)
    set(_names libhwy.a)
  endif()
  find_path(HWY_INCLUDE_DIR hwy/highway.h PATHS "$ENV{HWY_ROOT}/include" NO_DEFAULT_PATH)
  find_library(HWY_LIBRARY NAMES ${_names} PATHS "$ENV{HWY_ROOT}/lib" NO_DEFAULT_PATH)
endif()
if(NOT DEEPCOMPILE_HIGHWAY_INSIDE)
  find_path(HWY_INCLUDE_DIR hwy/highway.h)
  find_library(HWY_LIBRARY hwy)
endif()

if(HWY_INCLUDE_DIR AND HWY_LIBRARY)
  message(STATUS "Highway: ${HWY_LIBRARY}")
  target_include_directories(Highway::hwy SYSTEM INTERFACE "${HWY_INCLUDE_DIR}")
  target_link_libraries(Highway::hwy INTERFACE "${HWY_LIBRARY}")
else()
  set(_sources "${CMAKE_BINARY_DIR}/highway")
  if(NOT EXISTS "${_sources}/hwy/highway.h")
    find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
    execute_process(COMMAND "${Python_EXECUTABLE}" "${_here}/fetch_highway.py" "${_sources}" RESULT_VARIABLE _status
                    ERROR_VARIABLE _error OUTPUT_QUIET)
    if(NOT _status EQUAL 0)
      message(FATAL_ERROR "${_error}Highway is needed (SIMD, https://github.com/google/highway): set HWY_ROOT to a folder that has "
                          "include/hwy and lib/libhwy.a, or build where pip reaches its index.")
    endif()
  endif()
  message(STATUS "Highway: sources of the Python index")
  # What a program needs that asks for a target and calls its functions; the rest of Highway is in its headers.
  add_library(hwy STATIC "${_sources}/hwy/abort.cc" "${_sources}/hwy/targets.cc")
  target_include_directories(hwy SYSTEM PUBLIC "${_sources}")
  target_compile_definitions(hwy PUBLIC HWY_STATIC_DEFINE)
  target_link_libraries(Highway::hwy INTERFACE hwy)
endif()
