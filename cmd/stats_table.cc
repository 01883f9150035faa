#include "cmd/stats_table.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "cmd/logged_run.h"
#include "cmd/text_table.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

std::string Cell(const StatsColumn& column, const Value& value) {
  if (!value) return "-";
  switch (column.shown) {
    case Shown::kPercent:
      return PercentText(*value);
    case Shown::kCosine:
      return fmt::format("{:.3f}", *value);
    case Shown::kWhole:
      return fmt::format("{:.0f}", *value);
    default:
      return fmt::format("{:.3g}", *value);
  }
}

Json JsonOf(const Value& value) {
  if (!value) return nullptr;
  if (std::isfinite(*value)) return *value;
  return std::isnan(*value) ? "nan" : *value > 0 ? "inf" : "-inf";
}

}  // namespace

std::string TableText(const StatsTable& table, const OutputFlags& output) {
  std::vector<TextTable::Column> titles = {{"update"}};
  if (!table.of.empty()) titles.push_back({table.of, true});
  for (const StatsColumn& column : table.columns) {
    if (column.shown != Shown::kNotInTable) titles.push_back({column.title});
  }
  TextTable text(titles);
  for (const StatsRow& row : table.rows) {
    std::vector<std::string> cells = {fmt::format("{}", row.update)};
    if (!table.of.empty()) cells.push_back(row.of);
    for (size_t c = 0; c < table.columns.size(); ++c) {
      const StatsColumn& column = table.columns[c];
      if (column.shown != Shown::kNotInTable) cells.push_back(Cell(column, row.values[c]));
    }
    text.AddRow(std::move(cells));
  }
  return text.Text(output);
}

std::string CsvText(const StatsTable& table) {
  std::string out = "update,of";
  for (const StatsColumn& column : table.columns) out += "," + column.key;
  out += "\n";
  for (const StatsRow& row : table.rows) {
    out += fmt::format("{},{}", row.update, CsvField(row.of));
    for (const Value& value : row.values) out += value ? fmt::format(",{}", *value) : ",";
    out += "\n";
  }
  return out;
}

std::string JsonText(const StatsTable& table) {
  std::string out;
  for (const StatsRow& row : table.rows) {
    Json json = {{"update", row.update}, {"of", row.of}};
    for (size_t c = 0; c < table.columns.size(); ++c) {
      json[table.columns[c].key] = JsonOf(row.values[c]);
    }
    out += json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return out;
}

}  // namespace retrace
