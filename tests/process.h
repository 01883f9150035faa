// Running the built program from tests, as its user would.
#ifndef RETRACE_TESTS_PROCESS_H_
#define RETRACE_TESTS_PROCESS_H_

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/places.h"

namespace retrace {

inline std::string ProgramPath() { return BinaryDir() + "/retrace"; }

struct Finished {
  int code = -1;    // exit code; -1 where a signal ended it
  int signal = 0;
  std::string out, err;
};

inline std::string ReadFileText(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// A folder of its own, removed at the end.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "retrace-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// A running program, its output going to files.
class Process {
 public:
  Process(const std::vector<std::string>& words, const std::string& log) : log_(log) {
    pid_ = fork();
    if (pid_ != 0) return;
    for (const auto& [fd, suffix] : {std::pair(1, ".out"), std::pair(2, ".err")}) {
      const int file = open((log + suffix).c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
      dup2(file, fd);
    }
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  pid_t pid() const { return pid_; }
  void Signal(int number) const { kill(pid_, number); }

  Finished Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    Finished finished;
    if (WIFEXITED(status)) finished.code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) finished.signal = WTERMSIG(status);
    finished.out = ReadFileText(log_ + ".out");
    finished.err = ReadFileText(log_ + ".err");
    return finished;
  }

 private:
  std::string log_;
  pid_t pid_;
};

inline Finished RunProgram(std::vector<std::string> words) {
  const TempFolder folder;
  words.insert(words.begin(), ProgramPath());
  return Process(words, folder / "log").Wait();
}

}  // namespace retrace

#endif  // RETRACE_TESTS_PROCESS_H_
