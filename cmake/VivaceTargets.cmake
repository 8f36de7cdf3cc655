# What every target of this project has in common, and a function per kind of target.

add_library(vivace_options INTERFACE)
target_include_directories(vivace_options INTERFACE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR})
target_compile_options(vivace_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-missing-field-initializers -fno-omit-frame-pointer>)
target_compile_definitions(vivace_options INTERFACE
  VIVACE_VERSION="${PROJECT_VERSION}"
  # One SIMD variant above the baseline per architecture that was tested; more cost compile time.
  "HWY_DISABLED_TARGETS=(HWY_SSE4|HWY_AVX3|HWY_AVX3_DL|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64")
  target_compile_options(vivace_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=x86-64-v2>)  # the baseline: SSSE3 vectors and popcnt
endif()
target_link_options(vivace_options INTERFACE -Wl,--as-needed)
if(VIVACE_SANITIZE STREQUAL "address")
  target_compile_options(vivace_options INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=all)
  target_link_options(vivace_options INTERFACE -fsanitize=address,undefined)
elseif(VIVACE_SANITIZE STREQUAL "thread")
  target_compile_options(vivace_options INTERFACE -fsanitize=thread)
  target_link_options(vivace_options INTERFACE -fsanitize=thread)
elseif(NOT VIVACE_SANITIZE STREQUAL "")
  message(FATAL_ERROR "VIVACE_SANITIZE is ${VIVACE_SANITIZE}, needs address, thread or nothing")
endif()

# Portable kernels carry machine code for 9.0, and PTX of 8.0 and 9.0 that the driver compiles once for older and newer GPUs;
# files named sm90*.cu use instructions of compute capability 9.0a alone.
set(VIVACE_CUDA_FLAGS -Xfatbin -compress-all --compress-mode=size -lineinfo -Xptxas -warn-spills
  --expt-relaxed-constexpr --diag-suppress=2810)
set(VIVACE_PORTABLE_CODE "-gencode=arch=compute_80,code=compute_80;-gencode=arch=compute_90,code=[sm_90,compute_90]"
  CACHE STRING "Targets of the portable kernels; fewer compile faster")
set(VIVACE_SM90_CODE -gencode=arch=compute_90a,code=sm_90a)

# The layers that libvivace_c.so is made from.
set(VIVACE_SHARED_LAYERS core device cpu ops c_api)

# vivace_library(layer [RECURSE] DEPENDS ...): the static library vivace_<layer> from src/<layer>: its .cc files, and
# its .cu files when there is a CUDA compiler.
function(vivace_library layer)
  cmake_parse_arguments(ARG "RECURSE" "" "DEPENDS" ${ARGN})
  if(ARG_RECURSE)
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${layer}/*.cc)
  else()
    file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${layer}/*.cc)
  endif()
  if(VIVACE_HAS_CUDA)
    file(GLOB_RECURSE kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${layer}/*.cu)
    foreach(kernel ${kernels})
      get_filename_component(name ${kernel} NAME)
      if(name MATCHES "sm90")
        set_source_files_properties(${kernel} PROPERTIES COMPILE_OPTIONS "${VIVACE_CUDA_FLAGS};${VIVACE_SM90_CODE}")
      else()
        set_source_files_properties(${kernel} PROPERTIES COMPILE_OPTIONS "${VIVACE_CUDA_FLAGS};${VIVACE_PORTABLE_CODE}")
      endif()
    endforeach()
    list(APPEND sources ${kernels})
  endif()
  if(sources)
    add_library(vivace_${layer} STATIC ${sources})
    if(VIVACE_HAS_CUDA)
      set_target_properties(vivace_${layer} PROPERTIES CUDA_ARCHITECTURES OFF)
    endif()
    target_link_libraries(vivace_${layer} PUBLIC vivace_options ${ARG_DEPENDS} PRIVATE ${VIVACE_HIGHWAY_LIBRARY})
    if(layer IN_LIST VIVACE_SHARED_LAYERS)
      set_target_properties(vivace_${layer} PROPERTIES POSITION_INDEPENDENT_CODE ON)
      if(NOT layer STREQUAL "c_api")  # these export nothing, so that their code calls itself directly
        set_target_properties(vivace_${layer} PROPERTIES CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden
          VISIBILITY_INLINES_HIDDEN ON)
      endif()
    endif()
  else()
    add_library(vivace_${layer} INTERFACE)
    target_link_libraries(vivace_${layer} INTERFACE vivace_options ${ARG_DEPENDS})
  endif()
endfunction()

# vivace_program(name folder DEPENDS ...): build/bin/<name> from <folder>.
function(vivace_program name folder)
  cmake_parse_arguments(ARG "" "" "DEPENDS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${folder}/*.cc)
  add_executable(${name} ${sources})
  target_link_libraries(${name} PRIVATE ${ARG_DEPENDS})
endfunction()
