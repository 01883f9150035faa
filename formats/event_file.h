// EventFile: scalars as TensorBoard reads them: a file of TFRecords, each an Event protocol buffer.
// Used by `log --tensorboard`. A value that grows in memory: scalars of a run are a few megabytes.
// Not thread-safe.
//
// What is written of the protocol buffers: Event{wall_time = 1, step = 2, file_version = 3,
// summary = 5}, Summary{value = 1}, Summary.Value{tag = 1, simple_value = 2}. Those fields never
// change their meaning, so a writer of them needs no generated code.
#ifndef RETRACE_FORMATS_EVENT_FILE_H_
#define RETRACE_FORMATS_EVENT_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace retrace {

// CRC-32C (Castagnoli), and as TFRecord masks it: a CRC of data that hold CRCs is weak.
uint32_t Crc32c(std::string_view bytes);
uint32_t MaskedCrc32c(std::string_view bytes);

class EventFile {
 public:
  EventFile();  // begins with the version that readers look for

  // One event with a value for each tag. `seconds` is the time axis of TensorBoard's "relative".
  void Add(int64_t step, double seconds, const std::vector<std::pair<std::string, double>>& values);

  const std::string& bytes() const { return bytes_; }

 private:
  void AddRecord(const std::string& event);

  std::string bytes_;
};

// How a reader knows the file; the same name each time, so a later export takes its place.
inline constexpr char kEventFileName[] = "events.out.tfevents.0.retrace";

}  // namespace retrace

#endif  // RETRACE_FORMATS_EVENT_FILE_H_
