// The program with standard streams that are closed or full.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

std::string Quoted(const std::string& word) { return "'" + word + "'"; }

// The program through a shell, which redirects.
Finished RunWith(const std::string& words, const std::string& redirections) {
  const TempFolder folder;
  return Process({"/bin/sh", "-c", Quoted(ProgramPath()) + " " + words + " " + redirections},
                 folder / "log")
      .Wait();
}

std::string Train(const std::string& run) {
  return "train " + Quoted(SourceDir() + "/examples/tiny.toml") + " -o " +
         Quoted(run) + " --set " + Quoted("data.path=" + TestData("dataset/tiny")) +
         " --until 2 --threads 1";
}

TEST(Streams, ATrainingDoesNotNeedThem) {
  struct Case {
    const char* redirections;
    int code;  // 5 where the result was not printed
  };
  for (const Case& c : {Case{"2>&-", 0}, Case{"2>/dev/full", 0}, Case{"<&-", 0}, Case{">&-", 5},
                        Case{">/dev/full", 5}, Case{"<&- >&- 2>&-", 5}}) {
    SCOPED_TRACE(c.redirections);
    const TempFolder folder;
    const Finished done = RunWith(Train(folder / "run"), c.redirections);
    EXPECT_EQ(c.code, done.code) << done.err;
    const Finished verified = RunProgram({"verify", folder / "run", "--json"});
    EXPECT_EQ(0, verified.code) << verified.out;
    EXPECT_NE(std::string::npos, verified.out.find("\"last_position\": 2")) << verified.out;
    EXPECT_EQ(std::string::npos, ReadFileText(folder / "run/ledger.jsonl").find("finished"));
    EXPECT_EQ("", ReadFileText(folder / "run/lock"));
  }
}

// The program with a terminal of so many columns as its standard error. -> what came there.
std::string OnTerminal(int columns, const std::string& words) {
  const int controller = posix_openpt(O_RDWR | O_NOCTTY);
  EXPECT_GE(controller, 0);
  EXPECT_EQ(0, grantpt(controller) | unlockpt(controller));
  winsize size = {};
  size.ws_row = 24;
  size.ws_col = static_cast<unsigned short>(columns);
  const std::string terminal = ptsname(controller);
  const int keep_open = open(terminal.c_str(), O_RDWR | O_NOCTTY);
  EXPECT_EQ(0, ioctl(controller, TIOCSWINSZ, &size));
  std::string text;
  std::thread reader([&] {
    char block[4096];
    for (ssize_t n; (n = read(controller, block, sizeof block)) > 0;) text.append(block, n);
  });
  const Finished done = RunWith(words, "2>" + terminal);
  EXPECT_EQ(0, done.code);
  close(keep_open);  // the last: the reader gets an error
  reader.join();
  close(controller);
  return text;
}

TEST(Streams, ProgressNeverWrapsOnATerminal) {
  for (int columns : {200, 80, 60, 30, 5}) {
    const TempFolder folder;
    const std::string text =
        OnTerminal(columns, "train --color never " + Train(folder / "run").substr(6));
    EXPECT_NE(std::string::npos, text.find("\r\033[K")) << text;
    int width = 0, widest = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      const unsigned char c = static_cast<unsigned char>(text[i]);
      if (text.compare(i, 3, "\033[K") == 0)
        i += 2;
      else if (c == '\r' || c == '\n')
        width = 0;
      else if ((c & 0xc0) != 0x80)
        widest = std::max(widest, ++width);
    }
    EXPECT_LT(widest, columns);
    EXPECT_GT(widest, 2);
  }
}

TEST(Streams, AReportThatIsLostIsAnError) {
  const TempFolder folder;
  ASSERT_EQ(0, RunWith(Train(folder / "run"), "--quiet").code);
  const std::string run = Quoted(folder / "run");
  const std::string recipe = Quoted(SourceDir() + "/examples/tiny.toml");
  for (const std::string& words :
       {"show " + run, "log " + run, "log " + run + " --json", "diff " + run + " " + run,
        "verify " + run + " -q", "replay " + run + " --steps 1..1 -q", "recipe print " + recipe,
        "plan " + recipe, std::string("recipe keys"), std::string("interventions"),
        std::string("man"), std::string("completion bash"), std::string("--version"),
        std::string("train --help"), "data inspect " + Quoted(TestData("dataset/tiny"))}) {
    for (const char* redirection : {">/dev/full", ">&-"}) {
      const Finished done = RunWith(words, redirection);
      EXPECT_EQ(5, done.code) << words << " " << redirection << ": signal " << done.signal;
      EXPECT_TRUE(done.err.starts_with("retrace: ")) << words << ": " << done.err;
    }
  }
}

}  // namespace
}  // namespace retrace
