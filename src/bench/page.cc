#include "src/bench/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "src/bench/svg.h"

namespace vivace::bench {

namespace {

constexpr std::string_view kStyle = R"css(
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#16202c;--soft:#556371;--rule:#dde3e9;--grid:#e8ecf0;
--a:#1f5fd0;--b:#b85600;--c:#0b7a6b;--bad:#b3261e;--code:#eef1f5}
@media (prefers-color-scheme:dark){:root{--page:#0f141a;--card:#171e26;--ink:#e6ebf0;--soft:#9aa8b5;--rule:#2b3641;
--grid:#25303a;--a:#7aa7ff;--b:#ffab5e;--c:#4fd1bd;--bad:#ff8a80;--code:#202933}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:28px;line-height:1.25;margin:0 0 6px;font-weight:650;letter-spacing:-.01em}
h2{font-size:19px;margin:44px 0 4px;font-weight:650}
h3{font-size:15px;margin:0 0 8px;font-weight:600}
p{margin:4px 0 14px;max-width:78ch;color:var(--soft)}
p.lead{color:var(--ink);margin-bottom:10px;max-width:none}
code{font:13.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{background:var(--code);border-radius:8px;padding:12px 14px;margin:0 0 20px;overflow-x:auto;white-space:pre-wrap;
overflow-wrap:anywhere}
pre span{display:inline-block}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(155px,1fr));gap:12px;margin:20px 0 8px}
.card,.panel{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.card{padding:14px 16px}
.card b{display:block;font-size:27px;line-height:1.15;font-weight:650;font-variant-numeric:tabular-nums}
.card b small{font-size:14px;font-weight:500;color:var(--soft);margin-left:4px}
.card span{font-size:13.5px;color:var(--soft)}
.card.bad b{color:var(--bad)}
.panel{padding:16px 16px 8px;margin:10px 0}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:12px}
.three{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));gap:12px}
.two .panel,.three .panel{margin:0}
.legend{font-size:13.5px;color:var(--soft);margin:0 0 4px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin:0 6px 0 14px;vertical-align:-1px}
.legend i:first-child{margin-left:0}
i.a{background:var(--a)}i.b{background:var(--b)}i.c{background:var(--c)}
svg{display:block;width:100%;height:auto}
svg text{font-family:inherit;fill:var(--soft);font-size:12px}
svg .label{fill:var(--ink);font-size:12.5px}
svg .marklabel{fill:var(--ink);font-size:12px;font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:4px}
.markback{fill:var(--card)}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--soft);fill:none}
.mark{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:4 3;fill:none}
.a{--series:var(--a)}.b{--series:var(--b)}.c{--series:var(--c)}
.fill{fill:var(--series);fill-opacity:.75}.area{fill:var(--series);fill-opacity:.2}
.line{stroke:var(--series);stroke-width:2;fill:none;stroke-linejoin:round}.line.thin{stroke-width:1.3;opacity:.75}
.dot{fill:var(--series);fill-opacity:.8;stroke:var(--card);stroke-width:.8}
.scroll{overflow-x:auto}.scroll svg{min-width:620px}
table{border-collapse:collapse;width:100%;font-size:14.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 14px 7px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{font-weight:600;font-size:13px;color:var(--soft)}
tr:last-child td{border-bottom:0}
.num{text-align:right}
td.why{color:var(--soft)}
ul.why{margin:0;padding:0;list-style:none}
footer{margin-top:40px;font-size:13.5px;color:var(--soft)}
@media print{body{background:#fff}.panel,.card{break-inside:avoid}}
)css";

}  // namespace

std::string page_begin(const std::string& title) {
  std::string out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>" +
      escape_html(title) + "</title>\n<style>";
  out += kStyle;
  return out + "</style></head>\n<body><main>\n";
}

std::string page_end(const std::string& footer) {
  return "<footer>" + escape_html(footer) + "</footer>\n</main></body></html>\n";
}

std::string card(const std::string& value, const std::string& unit, const std::string& what, bool bad) {
  return fmt::format("<div class=\"card{}\"><b>{}<small>{}</small></b><span>{}</span></div>\n",
                     bad ? " bad" : "", escape_html(value), escape_html(unit), escape_html(what));
}

std::string command_html(const std::string& command) {
  std::string out = "<span>";
  for (const char c : escape_html(command))
    out += c == ' ' ? std::string("</span> <span>") : std::string(1, c);
  return out + "</span>";
}

std::string tail(const std::vector<std::pair<const Distribution*, const char*>>& lines,
                 const std::string& legend, const std::string& title) {
  constexpr int kStepsPerDecade = 20;
  double widest = 10, slowest = 0;
  std::vector<std::vector<std::pair<double, double>>> all;
  for (const auto& [d, series] : lines) {
    std::vector<std::pair<double, double>>& points = all.emplace_back();
    const double count = static_cast<double>(d->values.size());
    for (int i = 0; count > 0; ++i) {
      const double n = std::min(count, std::pow(10, static_cast<double>(i) / kStepsPerDecade));
      points.push_back({n, percentile(d->values, 100 * (1 - 1 / n))});
      if (n >= count) break;
    }
    if (points.empty()) continue;
    widest = std::max(widest, points.back().first);
    slowest = std::max(slowest, points.back().second);
  }
  Plot plot(520, 300, {"one in N (logarithmic)", 1, widest, false, true},
            {"milliseconds", 0, axis_end(slowest)});
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].empty()) plot.line(all[i], lines[i].second);
  }
  return "<p class=\"legend\">" + legend + "</p>" + plot.svg(title);
}

}  // namespace vivace::bench
