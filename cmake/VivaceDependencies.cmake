# Third-party libraries: Debian 12 packages, linked statically or header-only, so that the program also runs elsewhere.
# Which and why: docs/dependencies.md.

find_package(Threads REQUIRED)
find_path(VIVACE_JSON_INCLUDE nlohmann/json.hpp REQUIRED)
find_path(VIVACE_FMT_INCLUDE fmt/format.h REQUIRED)
find_path(VIVACE_HIGHWAY_INCLUDE hwy/highway.h REQUIRED)
find_path(VIVACE_CLI11_INCLUDE CLI/CLI.hpp REQUIRED)
find_path(VIVACE_BOOST_INCLUDE boost/beast/http.hpp REQUIRED)  # Asio and Beast, header-only

add_library(vivace_pcre2 INTERFACE)
find_path(VIVACE_PCRE2_INCLUDE pcre2.h REQUIRED)
find_library(VIVACE_PCRE2_LIBRARY NAMES libpcre2-8.a REQUIRED)
target_link_libraries(vivace_pcre2 INTERFACE ${VIVACE_PCRE2_LIBRARY})
target_compile_definitions(vivace_pcre2 INTERFACE PCRE2_CODE_UNIT_WIDTH=8 PCRE2_STATIC)

add_library(vivace_utf8proc INTERFACE)
find_path(VIVACE_UTF8PROC_INCLUDE utf8proc.h REQUIRED)
find_library(VIVACE_UTF8PROC_LIBRARY NAMES libutf8proc.a REQUIRED)
target_link_libraries(vivace_utf8proc INTERFACE ${VIVACE_UTF8PROC_LIBRARY})
target_compile_definitions(vivace_utf8proc INTERFACE UTF8PROC_STATIC)

# Highway is used header-only. Its library is needed by assertions in unoptimised and sanitizer builds alone, and
# --as-needed drops it from every other.
find_library(VIVACE_HIGHWAY_LIBRARY NAMES hwy REQUIRED)
