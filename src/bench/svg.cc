#include "src/bench/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/model/tokenizer.h"

namespace vivace::bench {

namespace {

constexpr double kMarginLeft = 66, kMarginRight = 26, kMarginTop = 12, kMarginBottom = 44;
constexpr double kMarkerRow = 15;  ///< height of one row of marker labels
constexpr double kLetter = 7;      ///< width of a letter of such a label, rather more than less

/// 1, 2 or 5 times a power of ten, so that `span` has about `wanted` steps.
double tick_step(double span, int wanted, bool whole) {
  const double raw = span / wanted;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) {
      step = factor * power;
      break;
    }
  }
  return whole ? std::max(1.0, std::round(step)) : step;
}

std::string tick_text(double value, double step) {
  if (std::abs(value) < step / 2) value = 0;  // not -0
  const int digits = step >= 1 ? 0 : static_cast<int>(std::ceil(-std::log10(step) - 1e-9));
  return digits == 0 ? pretty(std::round(value)) : fmt::format("{:.{}f}", value, digits);
}

/// Where ticks stand, with their texts. On a logarithmic axis: powers of ten, with multiples between them where few
/// powers fit.
std::vector<std::pair<double, std::string>> x_ticks(const Axis& axis, int wanted) {
  std::vector<std::pair<double, std::string>> ticks;
  if (!axis.logarithmic) {
    const double step = tick_step(axis.high - axis.low, wanted, axis.whole);
    for (double x = std::ceil(axis.low / step - 1e-9) * step; x <= axis.high + step * 1e-6; x += step) {
      ticks.push_back({x, tick_text(x, step)});
    }
    return ticks;
  }
  const double decades = std::log10(axis.high / axis.low);
  std::vector<double> factors = {1};
  if (decades < 1.2) {
    factors = {1, 2, 5};
  } else if (decades < 2.5) {
    factors = {1, 3};
  }
  for (double power = std::pow(10, std::floor(std::log10(axis.low))); power <= axis.high; power *= 10) {
    for (const double factor : factors) {
      const double x = power * factor;
      if (x < axis.low * 0.999 || x > axis.high * 1.001) continue;
      ticks.push_back({x, tick_text(x, std::min(1.0, power))});
    }
  }
  return ticks;
}

std::string tip_of(const std::string& tip) {
  return tip.empty() ? std::string() : "<title>" + escape_html(tip) + "</title>";
}

}  // namespace

std::string escape_html(std::string_view text) {
  model::Utf8Stream stream;
  const std::string valid = stream.push(text) + stream.finish();
  std::string out;
  for (const char c : valid) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string pretty(double value) {
  if (!std::isfinite(value)) return "–";
  const double size = std::abs(value);
  if (size < 10 && size != std::floor(size)) return fmt::format("{:.2f}", value);
  if (size < 100 && size != std::floor(size)) return fmt::format("{:.1f}", value);
  std::string digits = fmt::format("{:.0f}", size);
  for (int64_t at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), ",");
  }
  return (value < 0 ? "-" : "") + digits;
}

double axis_end(double largest) {
  if (!(largest > 0)) return 1;
  const double step = tick_step(largest, 5, false);
  return std::ceil(largest / step * 1.02) * step;
}

Plot::Plot(int width, int height, Axis x, Axis y)
    : width_(width),
      height_(height),
      left_(kMarginLeft),
      right_(width - kMarginRight),
      top_(kMarginTop),
      bottom_(height - kMarginBottom),
      x_(std::move(x)),
      y_(std::move(y)) {}

double Plot::px(double x) const {
  const double share = x_.logarithmic ? std::log(std::max(x, x_.low) / x_.low) / std::log(x_.high / x_.low)
                                      : (x - x_.low) / (x_.high - x_.low);
  const double t = std::clamp(share, 0.0, 1.0);
  return left_ + t * (right_ - left_);
}

double Plot::py(double y) const {
  const double t = std::clamp((y - y_.low) / (y_.high - y_.low), 0.0, 1.0);
  return bottom_ - t * (bottom_ - top_);
}

void Plot::bar(double x0, double x1, double y, std::string_view series, const std::string& tip) {
  const double width = std::max(0.5, px(x1) - px(x0) - 1), base = py(y_.low);
  const double height = std::max(1.0, base - py(y));  // a single value beside thousands still shows
  marks_ += fmt::format(
      "<rect class=\"fill {}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">{}</rect>",
      series, px(x0) + 0.5, base - height, width, height, tip_of(tip));
}

void Plot::area(const std::vector<std::pair<double, double>>& points, std::string_view series) {
  if (points.empty()) return;
  std::string path = fmt::format("M{:.1f} {:.1f}", px(points.front().first), py(y_.low));
  for (const auto& [x, y] : points) path += fmt::format("L{:.1f} {:.1f}", px(x), py(y));
  path += fmt::format("L{:.1f} {:.1f}Z", px(points.back().first), py(y_.low));
  marks_ += fmt::format("<path class=\"area {}\" d=\"{}\"/>", series, path);
}

void Plot::line(const std::vector<std::pair<double, double>>& points, std::string_view series) {
  std::string path;
  for (const auto& [x, y] : points)
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px(x), py(y));
  marks_ += fmt::format("<path class=\"line {}\" d=\"{}\"/>", series, path);
}

void Plot::dot(double x, double y, std::string_view series, const std::string& tip) {
  marks_ += fmt::format("<circle class=\"dot {}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\">{}</circle>", series,
                        px(x), py(y), tip_of(tip));
}

void Plot::whisker(double x, double y0, double y1, std::string_view series) {
  const double at = px(x), low = py(y0), high = py(y1);
  marks_ += fmt::format(
      "<path class=\"line thin {}\" d=\"M{:.1f} {:.1f}V{:.1f}M{:.1f} {:.1f}h8M{:.1f} {:.1f}h8\"/>", series,
      at, low, high, at - 4, low, at - 4, high);
}

void Plot::marker(double x, const std::string& label, int level) {
  const double at = px(x), baseline = top_ + 9 + level * kMarkerRow;
  const bool flip = at > left_ + (right_ - left_) * 0.6;  // the label stays inside the frame
  marker_lines_ += fmt::format("<path class=\"mark\" d=\"M{:.1f} {:.1f}V{:.1f}\"/>", at, top_, bottom_);
  const std::string text = escape_html(label);
  const double width = kLetter * static_cast<double>(label.size()) + 4;
  // The lines of other markers end at the label.
  marker_labels_ +=
      fmt::format("<rect class=\"markback\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>",
                  flip ? at - 3 - width : at + 3, baseline - 11, width, kMarkerRow);
  marker_labels_ +=
      fmt::format("<text class=\"marklabel\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>",
                  flip ? at - 5 : at + 5, baseline, flip ? "end" : "start", text);
}

void Plot::add_axes(std::string& out) const {
  const double y_step = tick_step(y_.high - y_.low, height_ > 190 ? 5 : 3, y_.whole);
  for (double y = y_.low; y <= y_.high + y_step * 1e-6; y += y_step) {
    out += fmt::format("<path class=\"grid\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>", left_, py(y), right_);
    out += fmt::format("<text class=\"tick\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>",
                       left_ - 8, py(y) + 4, tick_text(y, y_step));
  }
  for (const auto& [x, text] : x_ticks(x_, width_ > 500 ? 9 : 5)) {
    out += fmt::format("<path class=\"axis\" d=\"M{:.1f} {:.1f}v4\"/>", px(x), bottom_);
    out += fmt::format("<text class=\"tick\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>",
                       px(x), bottom_ + 17, text);
  }
  out += fmt::format("<path class=\"axis\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>", left_, bottom_, right_);
  out += fmt::format("<text class=\"label\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>",
                     (left_ + right_) / 2, height_ - 8, escape_html(x_.label));
  out += fmt::format(
      "<text class=\"label\" transform=\"translate(13 {:.1f}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
      (top_ + bottom_) / 2, escape_html(y_.label));
}

std::string Plot::svg(const std::string& title) const {
  std::string out = fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}\">", width_,
                                height_, escape_html(title));
  add_axes(out);
  return out + marks_ + marker_lines_ + marker_labels_ + "</svg>\n";
}

}  // namespace vivace::bench
