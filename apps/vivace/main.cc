#include <cstdio>
#include <exception>
#include <type_traits>

#include "apps/vivace/commands.h"
#include "apps/vivace/output.h"

int main(int argc, char** argv) {
  using namespace vivace::cli;
  try {
    const Parsed parsed = parse_command_line(argc, argv);
    const int code = std::visit(
        [&](const auto& args) {
          if constexpr (std::is_same_v<std::decay_t<decltype(args)>, std::monostate>) {
            return parsed.exit_code;
          } else {
            return run(args);
          }
        },
        parsed.command);
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      std::fprintf(stderr, "vivace: standard output could not be written\n");
      return kFailure;
    }
    return code;
  } catch (const std::exception& error) {  // out of memory while formatting; everything else is a Status
    std::fprintf(stderr, "vivace: %s\n", error.what());
    return kFailure;
  }
}
