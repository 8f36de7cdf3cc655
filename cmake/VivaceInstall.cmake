# `cmake --install build --prefix P`: the program, the public headers, one static library of the engine and all below it, the
# shared library of the C ABI, and a CMake package, so that find_package(vivace) gives vivace::vivace and vivace::c. The tree may
# be moved afterwards.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(objects)
foreach(layer core device cpu ops model engine)
  list(APPEND objects $<TARGET_OBJECTS:vivace_${layer}>)
endforeach()
add_library(vivace_embed STATIC ${objects})
set_target_properties(vivace_embed PROPERTIES OUTPUT_NAME vivace EXPORT_NAME vivace LINKER_LANGUAGE CXX)
target_compile_features(vivace_embed INTERFACE cxx_std_20)
target_include_directories(vivace_embed INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(vivace_embed INTERFACE Threads::Threads ${VIVACE_CUDART})

# Archives of Debian packages that the library calls; the package finds them where it is used.
set(VIVACE_PACKAGE_ARCHIVES libpcre2-8.a libutf8proc.a)
if(CMAKE_BUILD_TYPE STREQUAL "Debug")
  list(APPEND VIVACE_PACKAGE_ARCHIVES libhwy.a)  # its assertions
endif()

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/vivace)
configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/vivace-config.cmake.in ${CMAKE_BINARY_DIR}/vivace-config.cmake
  INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/vivace-config-version.cmake COMPATIBILITY SameMinorVersion)

# `--component program` leaves out what only developers need.
if(TARGET vivace)
  install(TARGETS vivace COMPONENT program)
endif()
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT program)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/vivace DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
  FILES_MATCHING PATTERN "*.h")
install(TARGETS vivace_embed vivace_c EXPORT vivace-targets COMPONENT development)
install(EXPORT vivace-targets NAMESPACE vivace:: DESTINATION ${package_folder} COMPONENT development)
install(FILES ${CMAKE_BINARY_DIR}/vivace-config.cmake ${CMAKE_BINARY_DIR}/vivace-config-version.cmake
  DESTINATION ${package_folder} COMPONENT development)
