// TextTable: columns that line up, and the printing of a whole report. Used by log, diff and show.
#ifndef RETRACE_CMD_TEXT_TABLE_H_
#define RETRACE_CMD_TEXT_TABLE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cmd/console.h"

namespace retrace {

class TextTable {
 public:
  struct Column {
    std::string title;
    bool left = false;  // numbers stand right
  };

  explicit TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // A cell for each column.
  void AddRow(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }

  // Lines with newlines; titles dim. `indent` blanks before each; columns two blanks apart.
  std::string Text(const OutputFlags& flags, int indent = 0) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// Columns that text takes on a terminal: its code points without colour (no wide characters are
// printed here).
int DisplayWidth(std::string_view text);

// "12,345,678"
std::string Grouped(int64_t number);

// A share as "57 %", "1.3 %": two digits.
std::string PercentText(double share);

// The end of a path: what runs are called in legends.
std::string BaseName(std::string path);

// Writes to standard output; where that fails (a full disk), ends the command.
void PrintReport(const std::string& text);

// Columns of the terminal: COLUMNS, else what the terminal says, else 80.
int TerminalWidth();

}  // namespace retrace

#endif  // RETRACE_CMD_TEXT_TABLE_H_
