// StatsTable: numbers of updates and of what they are about, as a table, CSV or JSON lines. Used by
// stats.
#ifndef RETRACE_CMD_STATS_TABLE_H_
#define RETRACE_CMD_STATS_TABLE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cmd/console.h"

namespace retrace {

using Value = std::optional<double>;  // nullopt: not known

enum class Shown { kNumber, kPercent, kCosine, kWhole, kNotInTable };

struct StatsColumn {
  std::string key, title;  // in CSV and JSON; in the table
  Shown shown = Shown::kNumber;
};

struct StatsRow {
  int64_t update = 0;
  std::string of;
  std::vector<Value> values;  // by column
};

struct StatsTable {
  std::string of;  // title of what rows are about; "": all are about the same
  std::vector<StatsColumn> columns;
  std::vector<StatsRow> rows;
};

std::string TableText(const StatsTable& table, const OutputFlags& output);
std::string CsvText(const StatsTable& table);
std::string JsonText(const StatsTable& table);  // a line a row

}  // namespace retrace

#endif  // RETRACE_CMD_STATS_TABLE_H_
