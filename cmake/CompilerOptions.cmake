# Language level, warnings and sanitizers for all of our own code.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -g1 -DNDEBUG") # symbols go to a file of their own: see kvcell_split_debug

find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE}")
endif()

# -ffp-contract=off: cell bytes may not depend on whether the compiler fuses a multiplication with an addition.
add_library(kvcell_options INTERFACE)
target_compile_options(kvcell_options INTERFACE
  -Wall -Wextra -Wconversion -Wshadow -Wnon-virtual-dtor -Werror -ffp-contract=off -fvisibility=hidden)
if(KVCELL_SANITIZE)
  target_compile_options(kvcell_options INTERFACE -fsanitize=${KVCELL_SANITIZE} -fno-omit-frame-pointer -O1)
  target_link_options(kvcell_options INTERFACE -fsanitize=${KVCELL_SANITIZE})
  # g++ 12 sees uninitialized optionals where the sanitizers' code hides the check that guards them.
  target_compile_options(kvcell_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  if(KVCELL_SANITIZE MATCHES "undefined")
    target_compile_options(kvcell_options INTERFACE -fno-sanitize-recover=undefined)
  endif()
endif()

# Moves a program's debug symbols to NAME.debug beside it; debuggers find them through the link.
function(kvcell_split_debug target)
  add_custom_command(TARGET ${target} POST_BUILD
    COMMAND ${CMAKE_OBJCOPY} --only-keep-debug $<TARGET_FILE:${target}> $<TARGET_FILE:${target}>.debug
    COMMAND ${CMAKE_OBJCOPY} --strip-debug --add-gnu-debuglink=$<TARGET_FILE:${target}>.debug $<TARGET_FILE:${target}>
    VERBATIM)
endfunction()
