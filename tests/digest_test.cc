#include "core/digest.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace retrace {
namespace {

TEST(Digest, EmptyInputHasThePublishedXxh3Value) {
  EXPECT_EQ("99aa06d3014798d86001c324468d497f", DigestOf("", 0).Hex());  // xxHash specification
}

TEST(Digest, HexRoundTripsAndRefusesOtherText) {
  const Digest digest = DigestOf("retrace");
  EXPECT_EQ(digest, ParseDigest(digest.Hex()).value());
  for (const char* bad : {"", "12", "G0aa06d3014798d86001c324468d497f",
                          "99AA06D3014798D86001C324468D497F", "99aa06d3014798d86001c324468d497f0"}) {
    EXPECT_EQ(StatusCode::kDamaged, ParseDigest(bad).status().code()) << bad;
  }
}

TEST(Digest, StreamEqualsOneCallForAnySplit) {
  std::string text(5000, 'x');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 7);
  for (size_t split : {size_t{0}, size_t{1}, size_t{255}, size_t{4096}, text.size()}) {
    DigestStream stream;
    stream.Update(text.data(), split);
    stream.Update(text.data() + split, text.size() - split);
    EXPECT_EQ(DigestOf(text), stream.Finish());
  }
}

TEST(Digest, TensorDigestIsTheListOfItsLeaves) {
  std::vector<char> data(kDigestLeafBytes + 12, 3);
  const std::vector<Digest> leaves = {DigestOf(data.data(), kDigestLeafBytes),
                                      DigestOf(data.data() + kDigestLeafBytes, 12)};
  EXPECT_EQ(DigestOf(leaves), TensorDigest(data.data(), data.size()));
  data[kDigestLeafBytes + 3] ^= 1;
  EXPECT_NE(DigestOf(leaves), TensorDigest(data.data(), data.size()));
}

}  // namespace
}  // namespace retrace
