#include "formats/event_file.h"

#include <array>
#include <bit>

namespace retrace {
namespace {

constexpr uint32_t kCastagnoli = 0x82f63b78;  // reflected
constexpr uint32_t kMaskDelta = 0xa282ead8;
constexpr char kFileVersion[] = "brain.Event:2";

constexpr std::array<uint32_t, 256> CrcTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kCastagnoli : 0);
    table[byte] = crc;
  }
  return table;
}

template <class T>
void PutLittleEndian(T value, std::string* out) {
  for (size_t i = 0; i < sizeof value; ++i) *out += static_cast<char>(value >> (8 * i));
}

// --- Protocol buffers: a key is the field's number and how its value is coded ---

enum class Wire { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void PutVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) *out += static_cast<char>(value | 0x80);
  *out += static_cast<char>(value);
}

void PutKey(int field, Wire wire, std::string* out) {
  PutVarint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire), out);
}

void PutBytes(int field, std::string_view bytes, std::string* out) {
  PutKey(field, Wire::kBytes, out);
  PutVarint(bytes.size(), out);
  *out += bytes;
}

std::string ValueMessage(const std::string& tag, double value) {
  std::string message;
  PutBytes(1, tag, &message);
  PutKey(2, Wire::kFixed32, &message);
  PutLittleEndian(std::bit_cast<uint32_t>(static_cast<float>(value)), &message);
  return message;
}

std::string EventMessage(double seconds) {
  std::string message;
  PutKey(1, Wire::kFixed64, &message);
  PutLittleEndian(std::bit_cast<uint64_t>(seconds), &message);
  return message;
}

}  // namespace

uint32_t Crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = CrcTable();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

uint32_t MaskedCrc32c(std::string_view bytes) { return std::rotr(Crc32c(bytes), 15) + kMaskDelta; }

EventFile::EventFile() {
  std::string event = EventMessage(0);
  PutBytes(3, kFileVersion, &event);
  AddRecord(event);
}

void EventFile::Add(int64_t step, double seconds,
                    const std::vector<std::pair<std::string, double>>& values) {
  std::string summary;
  for (const auto& [tag, value] : values) PutBytes(1, ValueMessage(tag, value), &summary);
  std::string event = EventMessage(seconds);
  PutKey(2, Wire::kVarint, &event);
  PutVarint(static_cast<uint64_t>(step), &event);
  PutBytes(5, summary, &event);
  AddRecord(event);
}

void EventFile::AddRecord(const std::string& event) {
  std::string length;
  PutLittleEndian(static_cast<uint64_t>(event.size()), &length);
  bytes_ += length;
  PutLittleEndian(MaskedCrc32c(length), &bytes_);
  bytes_ += event;
  PutLittleEndian(MaskedCrc32c(event), &bytes_);
}

}  // namespace retrace
