# What `cmake --install` lays down: the library with its public headers for embedders, and the program where it is built.
include(CMakePackageConfigHelpers)

install(TARGETS kvcell EXPORT kvcell ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY "${CMAKE_SOURCE_DIR}/include/kvcell" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT kvcell FILE kvcellTargets.cmake NAMESPACE kvcell:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvcell)

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/kvcellConfig.cmake.in" "${CMAKE_BINARY_DIR}/kvcellConfig.cmake"
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvcell)
write_basic_package_version_file("${CMAKE_BINARY_DIR}/kvcellConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/kvcellConfig.cmake" "${CMAKE_BINARY_DIR}/kvcellConfigVersion.cmake"
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvcell)
install(FILES "${CMAKE_SOURCE_DIR}/LICENSE" DESTINATION ${CMAKE_INSTALL_DOCDIR})
