#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace vivace::bench {

/// `text` with the characters that mean something in HTML replaced, and invalid UTF-8 by U+FFFD.
std::string escape_html(std::string_view text);

/// A number with at most three significant digits after the point where they help: "0.45", "12.3", "1,234".
std::string pretty(double value);

/// One axis: its label with the unit, and the range of values it shows.
struct Axis {
  std::string label;
  double low = 0, high = 1;
  bool whole = false;        ///< ticks only at whole numbers
  bool logarithmic = false;  ///< x only; `low` is positive
};

/// A chart as one inline <svg>, coloured by the page's style sheet through the classes `a`, `b` and `c`.
/// Coordinates are data values; what is outside the axes is cut off.
class Plot {
 public:
  Plot(int width, int height, Axis x, Axis y);

  void bar(double x0, double x1, double y, std::string_view series, const std::string& tip = {});
  void area(const std::vector<std::pair<double, double>>& points, std::string_view series);
  void line(const std::vector<std::pair<double, double>>& points, std::string_view series);
  void dot(double x, double y, std::string_view series, const std::string& tip = {});
  /// A vertical stroke from y0 to y1 with small ends.
  void whisker(double x, double y0, double y1, std::string_view series);
  /// A vertical line over the whole height with a label at the top; `level` 0, 1, 2 puts labels of neighbours
  /// at different heights.
  void marker(double x, const std::string& label, int level);
  /// The finished element; `title` describes the chart to readers who do not see it.
  std::string svg(const std::string& title) const;

 private:
  double px(double x) const;
  double py(double y) const;
  void add_axes(std::string& out) const;

  double width_, height_, left_, right_, top_, bottom_;
  Axis x_, y_;
  std::string marks_, marker_lines_, marker_labels_;
};

/// The end of an axis that starts at 0 and shows `largest` with some room.
double axis_end(double largest);

}  // namespace vivace::bench
