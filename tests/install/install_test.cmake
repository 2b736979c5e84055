# Installs the build into a prefix, builds examples/ against it as a stranger would, and runs the result.
file(REMOVE_RECURSE "${SCRATCH}")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${SCRATCH}/prefix" COMMAND_ERROR_IS_FATAL ANY
  OUTPUT_QUIET)
foreach(installed include/kvcell/cache.h)
  if(NOT EXISTS "${SCRATCH}/prefix/${installed}")
    message(FATAL_ERROR "${installed} was not installed")
  endif()
endforeach()
set(flags "")
if(SANITIZE)
  set(flags "-DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE}")
endif()
# A copy, so that nothing of the tree around examples/ can be found by accident.
file(COPY "${SOURCE}/examples" DESTINATION "${SCRATCH}")
execute_process(
  COMMAND "${CMAKE_COMMAND}" -S "${SCRATCH}/examples" -B "${SCRATCH}/build" -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix
    -DCMAKE_CXX_COMPILER=${CXX} ${flags}
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${SCRATCH}/build" COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
set(PROGRAM "${SCRATCH}/build/embed_cache")
set(SCRATCH_ROOT "${SCRATCH}")
set(SCRATCH "${SCRATCH}/run")
include("${CMAKE_CURRENT_LIST_DIR}/run_example.cmake")
file(REMOVE_RECURSE "${SCRATCH_ROOT}")
