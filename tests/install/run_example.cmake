# Runs the example on an empty store and fails unless forked and resumed sequences agree.
file(REMOVE_RECURSE "${SCRATCH}")
file(MAKE_DIRECTORY "${SCRATCH}")
execute_process(COMMAND "${PROGRAM}" "${SCRATCH}/store" OUTPUT_VARIABLE output RESULT_VARIABLE result)
message("${output}")
if(NOT result EQUAL 0 OR NOT output MATCHES "brought back: 500 of 500 tokens" OR NOT output MATCHES "give the same output")
  message(FATAL_ERROR "the example ended with ${result}")
endif()
file(REMOVE_RECURSE "${SCRATCH}")
