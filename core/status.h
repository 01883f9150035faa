// Operating errors (bad file, full disk, lost rank): values, never exceptions, across layers.
// A message names the file, the field or tensor, what was expected, what came, and what to do next.
// Divergence is not an error: see diff.h. Programmer errors are RT_CHECKs: see check.h.
#ifndef RETRACE_CORE_STATUS_H_
#define RETRACE_CORE_STATUS_H_

#include <optional>
#include <string>
#include <utility>

#include "core/check.h"

namespace retrace {

// The value is the exit code of the program (docs/manual: exit codes extend those of cmp and diff).
enum class StatusCode {
  kOk = 0,
  kUsage = 2,        // the caller's words: flags, recipe, names
  kDamaged = 3,      // input that is not what it says it is
  kUnsupported = 4,  // right, but not on this machine or in this build
  kFailed = 5,       // the machine failed: full disk, lost rank, time-out
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // The same error seen from further out: "OUTER: message".
  Status Within(const std::string& outer) const {
    return ok() ? *this : Status(code_, outer + ": " + message_);
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status UsageError(std::string message) { return {StatusCode::kUsage, std::move(message)}; }
inline Status DamagedError(std::string message) {
  return {StatusCode::kDamaged, std::move(message)};
}
inline Status UnsupportedError(std::string message) {
  return {StatusCode::kUnsupported, std::move(message)};
}
inline Status FailedError(std::string message) { return {StatusCode::kFailed, std::move(message)}; }

// A value or the reason why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}                                 // NOLINT: implicit
  Result(Status status) : status_(std::move(status)) { RT_CHECK(!status_.ok()); }  // NOLINT

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & {
    RT_CHECK(ok());
    return *value_;
  }
  const T& value() const& {
    RT_CHECK(ok());
    return *value_;
  }
  T&& value() && {
    RT_CHECK(ok());
    return *std::move(value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace retrace

#define RT_RETURN_IF_ERROR(expression)                        \
  do {                                                        \
    ::retrace::Status rt_status = (expression);               \
    if (!rt_status.ok()) return rt_status;                    \
  } while (false)

#define RT_CONCAT_INNER(a, b) a##b
#define RT_CONCAT(a, b) RT_CONCAT_INNER(a, b)
// RT_ASSIGN_OR_RETURN(auto x, F()); in a function that returns Status or Result.
#define RT_ASSIGN_OR_RETURN(target, expression)                             \
  auto RT_CONCAT(rt_result_, __LINE__) = (expression);                      \
  if (!RT_CONCAT(rt_result_, __LINE__).ok())                                \
    return RT_CONCAT(rt_result_, __LINE__).status();                        \
  target = std::move(RT_CONCAT(rt_result_, __LINE__)).value()

#endif  // RETRACE_CORE_STATUS_H_
