// Where tests find the source tree, the build and the Pythons: known to places.cc alone, so that a
// compiler cache serves the tests of every checkout.
#ifndef RETRACE_TESTS_PLACES_H_
#define RETRACE_TESTS_PLACES_H_

#include <string>

namespace retrace {

std::string SourceDir();
std::string BinaryDir();
std::string TestPython();  // has scripts/test_requirements.txt, where scripts/setup.sh ran
std::string PeerPython();  // has scripts/peer_requirements.txt, likewise

}  // namespace retrace

#endif  // RETRACE_TESTS_PLACES_H_
