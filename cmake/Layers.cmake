# One call per folder of src/: its library, what it may use, and its unit tests (the *_test.cc beside the code).
#
#   kvcell_layer(NAME USES layer... LINKS target...)
#
# USES lists the layers below whose headers the folder includes; scripts/check_layers.py holds the same order against every
# include and fails CI when one points up.
function(kvcell_layer name)
  cmake_parse_arguments(arg "" "" "USES;LINKS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.cc")
  set(tests ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$")

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
    gtest_discover_tests(${name}_test DISCOVERY_MODE PRE_TEST TEST_PREFIX "${name}." PROPERTIES TIMEOUT 300)
  endif()
endfunction()
