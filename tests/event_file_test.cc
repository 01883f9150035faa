// Event files: checksums against published values, framing byte by byte. That TensorBoard reads
// them: cmd_report_test.cc.
#include "formats/event_file.h"

#include <gtest/gtest.h>

#include <cstring>

namespace retrace {
namespace {

TEST(Crc32c, HasThePublishedValues) {
  // RFC 3720, appendix B.4; the last is the check value of the Castagnoli polynomial.
  EXPECT_EQ(0x8a9136aau, Crc32c(std::string(32, '\0')));
  EXPECT_EQ(0x62a8ab43u, Crc32c(std::string(32, '\xff')));
  EXPECT_EQ(0xe3069283u, Crc32c("123456789"));
  EXPECT_EQ(0u, Crc32c(""));
}

TEST(Crc32c, IsMaskedAsTfRecordsAre) {
  const uint32_t crc = 0xe3069283u;
  EXPECT_EQ(((crc >> 15) | (crc << 17)) + 0xa282ead8u, MaskedCrc32c("123456789"));
}

uint64_t LittleEndian(const std::string& bytes, size_t at, int count) {
  uint64_t value = 0;
  for (int i = count - 1; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

std::vector<std::string> Records(const std::string& bytes) {
  std::vector<std::string> records;
  for (size_t at = 0; at < bytes.size();) {
    const uint64_t length = LittleEndian(bytes, at, 8);
    EXPECT_EQ(MaskedCrc32c(bytes.substr(at, 8)), LittleEndian(bytes, at + 8, 4));
    records.push_back(bytes.substr(at + 12, length));
    EXPECT_EQ(length, records.back().size());
    EXPECT_EQ(MaskedCrc32c(records.back()), LittleEndian(bytes, at + 12 + length, 4));
    at += 16 + length;
  }
  return records;
}

TEST(EventFile, IsRecordsOfEvents) {
  EventFile file;
  file.Add(300, 1.5, {{"loss", 0.25}});
  const std::vector<std::string> records = Records(file.bytes());
  ASSERT_EQ(2u, records.size());
  const std::string seconds0(8, '\0');
  EXPECT_EQ("\x09" + seconds0 +
                "\x1a\x0d"
                "brain.Event:2",
            records[0]);
  std::string seconds(8, '\0');
  const double value = 1.5;
  std::memcpy(seconds.data(), &value, sizeof value);
  const std::string scalar =
      std::string("\x0a\x04") + "loss" + "\x15" + std::string("\0\0\x80\x3e", 4);
  EXPECT_EQ("\x09" + seconds + std::string("\x10\xac\x02") + "\x2a\x0d" + "\x0a\x0b" + scalar,
            records[1]);
}

}  // namespace
}  // namespace retrace
