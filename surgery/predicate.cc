#include "surgery/predicate.h"

#include <fmt/format.h>

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "core/nearest_name.h"

namespace retrace {
namespace {

using Moment = SpikePredicate::Moment;
using Term = SpikePredicate::Term;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kDepthMax = 64;  // of parentheses and "not"

double OrInfinity(double x) { return std::isfinite(x) ? x : kInfinity; }

struct Field {
  const char* name;
  double (*get)(const Moment&);
};

constexpr Field kFields[] = {
    {"jump", [](const Moment& m) { return m.jump; }},
    {"peak", [](const Moment& m) { return WatchedLoss(*m.record); }},
    {"loss", [](const Moment& m) { return OrInfinity(m.record->loss); }},
    {"evaluation_loss",
     [](const Moment& m) { return OrInfinity(m.record->evaluation_loss.value_or(kInfinity)); }},
    {"gradient_norm", [](const Moment& m) { return OrInfinity(m.record->gradient_norm); }},
    {"clip", [](const Moment& m) { return OrInfinity(m.record->clip); }},
    {"lr", [](const Moment& m) { return OrInfinity(m.record->lr); }},
    {"update_rms",
     [](const Moment& m) { return OrInfinity(m.record->update_rms.value_or(kInfinity)); }},
    {"update", [](const Moment& m) { return static_cast<double>(m.record->update); }}};

bool IsNonFinite(const Moment& m) {
  return !std::isfinite(m.record->loss) || !std::isfinite(m.record->gradient_norm) ||
         !std::isfinite(m.record->evaluation_loss.value_or(0));
}

constexpr char kNonFinite[] = "non-finite";

// A number or a truth, and where it begins.
struct Value {
  Term term;
  bool truth = false;
  size_t at = 0;
};

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Result<Term> Parse() {
    RT_ASSIGN_OR_RETURN(Value value, Or());
    SkipBlanks();
    if (at_ < text_.size()) return Expected("and, or, a comparison or the end");
    RT_RETURN_IF_ERROR(Want(true, value));
    return std::move(value.term);
  }
  bool Names(const std::string& field) const { return names_.find("," + field + ",") != std::string::npos; }

 private:
  Result<Value> Or();
  Result<Value> And();
  Result<Value> Not();
  Result<Value> Comparison();
  Result<Value> Sum();
  Result<Value> Product();
  Result<Value> Sign();
  Result<Value> Primary();
  Result<Value> Word();

  Status ErrorAt(size_t at, const std::string& what) const {
    return UsageError(fmt::format("'{}': column {}: {}", text_, at + 1, what));
  }
  Status Expected(const std::string& what) const {
    const std::string got = at_ < text_.size() ? "'" + text_.substr(at_, 12) + "'" : "the end";
    return ErrorAt(at_, "expected " + what + ", got " + got);
  }
  // Errors: kUsage where a value is not what it has to be.
  Status Want(bool truth, const Value& value) const {
    if (value.truth == truth) return {};
    return ErrorAt(value.at, truth ? "expected a comparison, as in 'jump > 0.5', got a number"
                                   : "expected a number, got a comparison");
  }
  void SkipBlanks() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  // Takes a symbol.
  bool Take(const char* symbol) {
    SkipBlanks();
    const std::string s = symbol;
    if (text_.compare(at_, s.size(), s) != 0) return false;
    at_ += s.size();
    return true;
  }
  static bool IsWordByte(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.';
  }
  bool TakeWord(const std::string& word) {
    SkipBlanks();
    if (text_.compare(at_, word.size(), word) != 0) return false;
    const size_t end = at_ + word.size();
    if (end < text_.size() && IsWordByte(text_[end])) return false;
    at_ = end;
    return true;
  }

  const std::string text_;
  std::string names_ = ",";  // of the fields that were read
  size_t at_ = 0;
  int depth_ = 0;
};

Result<Value> Parser::Or() {
  RT_ASSIGN_OR_RETURN(Value left, And());
  while (TakeWord("or") || Take("||")) {
    RT_ASSIGN_OR_RETURN(const Value right, And());
    RT_RETURN_IF_ERROR(Want(true, left));
    RT_RETURN_IF_ERROR(Want(true, right));
    left.term = [a = left.term, b = right.term](const Moment& m) {
      return a(m) != 0 || b(m) != 0 ? 1.0 : 0.0;
    };
  }
  return left;
}

Result<Value> Parser::And() {
  RT_ASSIGN_OR_RETURN(Value left, Not());
  while (TakeWord("and") || Take("&&")) {
    RT_ASSIGN_OR_RETURN(const Value right, Not());
    RT_RETURN_IF_ERROR(Want(true, left));
    RT_RETURN_IF_ERROR(Want(true, right));
    left.term = [a = left.term, b = right.term](const Moment& m) {
      return a(m) != 0 && b(m) != 0 ? 1.0 : 0.0;
    };
  }
  return left;
}

Result<Value> Parser::Not() {
  SkipBlanks();
  const size_t at = at_;
  const bool bang = text_.compare(at_, 2, "!=") != 0 && Take("!");
  if (!bang && !TakeWord("not")) return Comparison();
  if (++depth_ > kDepthMax) return ErrorAt(at, "nested too deeply");
  RT_ASSIGN_OR_RETURN(const Value value, Not());
  --depth_;
  RT_RETURN_IF_ERROR(Want(true, value));
  return Value{[a = value.term](const Moment& m) { return a(m) != 0 ? 0.0 : 1.0; }, true, at};
}

Result<Value> Parser::Comparison() {
  struct Operator {
    const char* symbol;
    bool (*holds)(double, double);
  };
  static constexpr Operator kOperators[] = {
      {"<=", [](double a, double b) { return a <= b; }},
      {">=", [](double a, double b) { return a >= b; }},
      {"==", [](double a, double b) { return a == b; }},
      {"!=", [](double a, double b) { return a != b; }},
      {"<", [](double a, double b) { return a < b; }},
      {">", [](double a, double b) { return a > b; }}};
  RT_ASSIGN_OR_RETURN(Value left, Sum());
  for (const Operator& op : kOperators) {
    if (!Take(op.symbol)) continue;
    RT_ASSIGN_OR_RETURN(const Value right, Sum());
    RT_RETURN_IF_ERROR(Want(false, left));
    RT_RETURN_IF_ERROR(Want(false, right));
    return Value{[a = left.term, b = right.term, holds = op.holds](const Moment& m) {
                   return holds(a(m), b(m)) ? 1.0 : 0.0;
                 },
                 true, left.at};
  }
  return left;
}

Result<Value> Parser::Sum() {
  RT_ASSIGN_OR_RETURN(Value left, Product());
  while (true) {
    const bool plus = Take("+");
    if (!plus && !Take("-")) return left;
    RT_ASSIGN_OR_RETURN(const Value right, Product());
    RT_RETURN_IF_ERROR(Want(false, left));
    RT_RETURN_IF_ERROR(Want(false, right));
    left.term = [a = left.term, b = right.term, plus](const Moment& m) {
      return plus ? a(m) + b(m) : a(m) - b(m);
    };
  }
}

Result<Value> Parser::Product() {
  RT_ASSIGN_OR_RETURN(Value left, Sign());
  while (true) {
    const bool times = Take("*");
    if (!times && !Take("/")) return left;
    RT_ASSIGN_OR_RETURN(const Value right, Sign());
    RT_RETURN_IF_ERROR(Want(false, left));
    RT_RETURN_IF_ERROR(Want(false, right));
    left.term = [a = left.term, b = right.term, times](const Moment& m) {
      return times ? a(m) * b(m) : a(m) / b(m);
    };
  }
}

Result<Value> Parser::Sign() {
  SkipBlanks();
  const size_t at = at_;
  if (!Take("-")) return Primary();
  if (++depth_ > kDepthMax) return ErrorAt(at, "nested too deeply");
  RT_ASSIGN_OR_RETURN(const Value value, Sign());
  --depth_;
  RT_RETURN_IF_ERROR(Want(false, value));
  return Value{[a = value.term](const Moment& m) { return -a(m); }, false, at};
}

Result<Value> Parser::Primary() {
  SkipBlanks();
  const size_t at = at_;
  if (Take("(")) {
    if (++depth_ > kDepthMax) return ErrorAt(at, "nested too deeply");
    RT_ASSIGN_OR_RETURN(Value value, Or());
    --depth_;
    if (!Take(")")) return Expected("')'");
    value.at = at;
    return value;
  }
  if (at_ >= text_.size()) return Expected("a number or a field");
  const char c = text_[at_];
  if (std::isdigit(static_cast<unsigned char>(c)) || c == '.') {
    const char* begin = text_.c_str() + at_;
    char* end = nullptr;
    const double number = std::strtod(begin, &end);
    if (end == begin || IsWordByte(*end) || !std::isfinite(number)) return Expected("a number");
    at_ += end - begin;
    return Value{[number](const Moment&) { return number; }, false, at};
  }
  if (std::isalpha(static_cast<unsigned char>(c)) || c == '_') return Word();
  return Expected("a number or a field");
}

Result<Value> Parser::Word() {
  const size_t at = at_;
  if (TakeWord(kNonFinite)) {
    return Value{[](const Moment& m) { return IsNonFinite(m) ? 1.0 : 0.0; }, true, at};
  }
  while (at_ < text_.size() && IsWordByte(text_[at_])) ++at_;
  const std::string word = text_.substr(at, at_ - at);
  std::vector<std::string> names = {kNonFinite};
  for (const Field& field : kFields) {
    names.push_back(field.name);
    if (word != field.name) continue;
    names_ += word + ",";
    return Value{field.get, false, at};
  }
  return ErrorAt(at, fmt::format("there is no field '{}'; the nearest is '{}', all are {}", word,
                                 NearestName(word, names), fmt::join(names, ", ")));
}

}  // namespace

double WatchedLoss(const UpdateRecord& record) {
  return OrInfinity(record.evaluation_loss.value_or(record.loss));
}

UpdateRecord HaltedRecord(int64_t update, bool has_evaluation) {
  UpdateRecord record;
  record.update = update;
  record.action = "halted";
  record.loss = record.gradient_norm = kInfinity;
  if (has_evaluation) record.evaluation_loss = kInfinity;
  return record;
}

Result<SpikePredicate> SpikePredicate::Parse(const std::string& text) {
  Parser parser(text);
  RT_ASSIGN_OR_RETURN(Term term, parser.Parse());
  SpikePredicate predicate;
  predicate.text_ = text;
  predicate.holds_ = std::make_shared<const Term>(std::move(term));
  predicate.evaluation_loss_ = parser.Names("evaluation_loss");
  predicate.update_rms_ = parser.Names("update_rms");
  return predicate;
}

Status SpikePredicate::Check(const UpdateRecord& record) const {
  if (evaluation_loss_ && !record.evaluation_loss) {
    return UsageError("'" + text_ + "': evaluation_loss: the recipe has no evaluation batch "
                      "(data.evaluation_samples = 0)");
  }
  if (update_rms_ && !record.update_rms) {
    return UsageError("'" + text_ + "': update_rms: records have it only where the recipe's "
                      "store.flight.update_rms is above 0");
  }
  return {};
}

std::optional<int64_t> SpikePredicate::FirstSpike(const std::vector<UpdateRecord>& records) const {
  double least = kInfinity;
  for (const UpdateRecord& record : records) {
    const double loss = WatchedLoss(record);
    Moment moment = {&record, 0};
    if (least < kInfinity) moment.jump = loss - least;
    else if (loss == kInfinity) moment.jump = kInfinity;
    if ((*holds_)(moment) != 0) return record.update;
    least = std::min(least, loss);
  }
  return std::nullopt;
}

}  // namespace retrace
