# One call per folder of src/: its library, what it may use, and its unit tests (the *_test.cc beside the code).
#
#   kvcell_layer(NAME [CONCURRENT] USES layer... LINKS target...)
#
# USES lists the layers below whose headers the folder includes; scripts/check_layers.py holds the same order against every
# include and fails CI when one points up. CONCURRENT marks a layer whose tests run threads: `make test-all` runs these
# under ThreadSanitizer too. Tests with "Slow" in their name are left to `make test-all`. A main.cc is no part of the library.
function(kvcell_layer name)
  cmake_parse_arguments(arg "CONCURRENT" "" "USES;LINKS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.cc")
  set(tests ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  list(FILTER sources EXCLUDE REGEX "(_test|/main)\\.cc$")

  if(NOT sources) # a layer whose code is still to come
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/empty.cc" "")
    set(sources "${CMAKE_CURRENT_BINARY_DIR}/empty.cc")
  endif()
  add_library(kvcell_${name} STATIC ${sources})
  target_include_directories(kvcell_${name} PUBLIC
    $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include> $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/src>)
  target_link_libraries(kvcell_${name} PUBLIC fmt::fmt Threads::Threads PRIVATE kvcell_options)
  set(used "")
  foreach(layer ${arg_USES})
    list(APPEND used kvcell_${layer})
  endforeach()
  target_link_libraries(kvcell_${name} PUBLIC ${used} ${arg_LINKS})

  if(KVCELL_TESTS AND tests)
    add_executable(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE kvcell_${name} kvcell_options GTest::gmock GTest::gtest_main)
    target_compile_options(${name}_test PRIVATE -O1 -g0) # tests are compiled often and run briefly
    set(label unit)
    if(arg_CONCURRENT)
      set(label unit-concurrent)
    endif()
    kvcell_discover_tests(${name}_test ${name} ${label})
  endif()
endfunction()

# Registers a GoogleTest program's tests as PREFIX.Suite.Name. `label` is matched as a regular expression by ctest -L.
function(kvcell_discover_tests target prefix label)
  gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST TEST_PREFIX "${prefix}." TEST_FILTER "-*Slow*"
    TEST_LIST ${target}_fast PROPERTIES TIMEOUT 300 LABELS ${label})
  gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST TEST_PREFIX "${prefix}." TEST_FILTER "*Slow*"
    TEST_LIST ${target}_slow PROPERTIES TIMEOUT 1800 LABELS ${label}-slow)
endfunction()
