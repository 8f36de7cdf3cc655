# libvivace_c.so: the operators behind the C ABI (vivace/c_api.h). It exports vivace_* and nothing else, brings the C++ runtime
# along, and so lives in any process beside any other C++ library.

include(GNUInstallDirs)
vivace_library(c_api DEPENDS vivace_ops)

set(version_script ${CMAKE_CURRENT_LIST_DIR}/vivace_c.map)
add_library(vivace_c SHARED $<TARGET_OBJECTS:vivace_c_api>)
target_link_libraries(vivace_c PRIVATE vivace_ops)
target_include_directories(vivace_c INTERFACE
  $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_options(vivace_c PRIVATE -Wl,--version-script=${version_script})
if(NOT VIVACE_SANITIZE)
  target_link_options(vivace_c PRIVATE -static-libstdc++ -static-libgcc -Wl,-z,defs)
endif()
set_target_properties(vivace_c PROPERTIES EXPORT_NAME c VERSION ${PROJECT_VERSION} SOVERSION 1 LINK_DEPENDS ${version_script}
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib LINKER_LANGUAGE CXX)
