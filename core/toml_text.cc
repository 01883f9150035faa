#include "core/toml_text.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <memory>

namespace retrace {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 20;
// The TOML library builds and frees a dotted key a.a.a... by recursion, without a limit of its own:
// about 40,000 dots overflow the stack. A recipe of 1024 layers needs some 1200.
constexpr std::ptrdiff_t kMaxDots = 4096;

}  // namespace

Status CheckTomlSize(std::string_view toml) {
  if (toml.size() > kMaxBytes) {
    return UsageError("expected at most 1 MiB, got " + std::to_string(toml.size()) + " bytes");
  }
  const std::ptrdiff_t dots = std::count(toml.begin(), toml.end(), '.');
  if (dots <= kMaxDots) return {};
  return UsageError("expected at most " + std::to_string(kMaxDots) + " dots, got " +
                    std::to_string(dots));
}

Result<std::string> ReadTomlFile(const std::string& path, const std::string& what) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) {
    return UsageError(path + ": expected " + what + ", but it can not be opened");
  }
  std::string text(kMaxBytes + 1, '\0');  // one more than allowed, so that the excess is seen
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get())) {
    return UsageError(path + ": expected " + what + ", but it can not be read");
  }
  return text;
}

}  // namespace retrace
