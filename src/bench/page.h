#pragma once

#include <string>
#include <utility>
#include <vector>

#include "src/bench/metrics.h"

// What the pages of runs and of comparisons share.

namespace vivace::bench {

/// Everything up to and with <main>: the title, the style sheet, light and dark. No scripts, no network.
std::string page_begin(const std::string& title);
/// The end of a page, after a last line.
std::string page_end(const std::string& footer);

/// A number that stands out, with its unit and what it is.
std::string card(const std::string& value, const std::string& unit, const std::string& what,
                 bool bad = false);

/// A command line. Lines break between words only: a browser would break after the hyphens of a flag.
std::string command_html(const std::string& command);

/// How slow the slowest are: a chart of "one value in N is above the line", with a line per distribution and the class
/// of its colour.
std::string tail(const std::vector<std::pair<const Distribution*, const char*>>& lines,
                 const std::string& legend, const std::string& title);

}  // namespace vivace::bench
