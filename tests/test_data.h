// Where tests find their data: tests/data, in the source tree.
#ifndef RETRACE_TESTS_TEST_DATA_H_
#define RETRACE_TESTS_TEST_DATA_H_

#include <string>

#include "tests/places.h"

namespace retrace {

inline std::string TestData(const std::string& name) {
  return SourceDir() + "/tests/data/" + name;
}

}  // namespace retrace

#endif  // RETRACE_TESTS_TEST_DATA_H_
