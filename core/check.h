// Assertions for programmer errors, on in every build. Used by all layers.
// A failed check prints the condition, what was expected and what came, and aborts: the state of the
// program is no longer what its author thought, so nothing it computes may be recorded.
// (The name CHECK belongs to c10.)
#ifndef RETRACE_CORE_CHECK_H_
#define RETRACE_CORE_CHECK_H_

#include <sstream>
#include <string>

namespace retrace {

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const std::string& detail);

namespace check_internal {
template <class A, class B>
std::string ExpectedGot(const A& expected, const B& got) {
  std::ostringstream out;
  out << "expected " << expected << ", got " << got;
  return out.str();
}
}  // namespace check_internal
}  // namespace retrace

#define RT_CHECK(condition)                                              \
  do {                                                                   \
    if (!(condition)) [[unlikely]]                                       \
      ::retrace::CheckFailed(__FILE__, __LINE__, #condition, "");        \
  } while (false)

#define RT_CHECK_EQ(expected, got)                                       \
  do {                                                                   \
    const auto& rt_expected = (expected);                                \
    const auto& rt_got = (got);                                          \
    if (!(rt_expected == rt_got)) [[unlikely]]                           \
      ::retrace::CheckFailed(__FILE__, __LINE__, #expected " == " #got,  \
                             ::retrace::check_internal::ExpectedGot(rt_expected, rt_got)); \
  } while (false)

#endif  // RETRACE_CORE_CHECK_H_
