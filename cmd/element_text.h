// The first element in which two tensors differ, as diff and bisect print it.
#ifndef RETRACE_CMD_ELEMENT_TEXT_H_
#define RETRACE_CMD_ELEMENT_TEXT_H_

#include <string>

#include "core/diff.h"

namespace retrace {

// Both values, their bits in hexadecimal, and the distance: "1 and 1.5 (0x3f800000, 0x3fc00000),
// 4,194,304 ULP", or "NaN in one".
std::string ElementText(const ElementDifference& element);

}  // namespace retrace

#endif  // RETRACE_CMD_ELEMENT_TEXT_H_
