#include "tests/places.h"

namespace retrace {

std::string SourceDir() { return RETRACE_SOURCE_DIR; }
std::string BinaryDir() { return RETRACE_BINARY_DIR; }
std::string TestPython() { return RETRACE_TEST_PYTHON; }
std::string PeerPython() { return RETRACE_PEER_PYTHON; }

}  // namespace retrace
