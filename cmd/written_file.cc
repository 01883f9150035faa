#include "cmd/written_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "formats/file_ops.h"

namespace retrace {
namespace {

Status WriteAt(const std::string& path, std::string_view bytes) {
  RT_ASSIGN_OR_RETURN(File file, FileOps().Create(path));
  RT_RETURN_IF_ERROR(file.Write(bytes));
  return file.Close();
}

}  // namespace

Status WriteWholeFile(const std::string& path, std::string_view bytes) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return UsageError(path + ": is a directory; expected a file's name");
  }
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder, error)) {
    return UsageError(fmt::format("{}: there is no directory {}", path, folder.string()));
  }
  // A device or a pipe (/dev/stdout) has no other name to be written under.
  if (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error)) {
    return WriteAt(path, bytes);
  }
  const std::string part = fmt::format("{}.{}.part", path, getpid());
  if (Status status = WriteAt(part, bytes); !status.ok()) {
    std::filesystem::remove(part, error);
    return status;
  }
  std::filesystem::rename(part, path, error);
  if (!error) return {};
  std::error_code ignored;
  std::filesystem::remove(part, ignored);
  return FailedError(fmt::format("{}: can not be replaced: {}", path, error.message()));
}

}  // namespace retrace
