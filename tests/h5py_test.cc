// Run files as seen by h5py with hdf5plugin, from PyPI, in a virtual environment under the build
// directory. Skipped with the reason where no registry can be reached.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>

#include "tests/places.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

int Shell(const std::string& command) {
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// The Python with h5py; empty: none, and *why.
std::string Python(std::string* why) {
  const std::string venv = BinaryDir() + "/h5py-venv", python = venv + "/bin/python";
  const std::string log = BinaryDir() + "/h5py-venv.log";
  if (Shell(python + " -c 'import h5py, hdf5plugin' >/dev/null 2>&1") == 0) return python;
  if (Shell("python3 -m venv " + venv + " >" + log + " 2>&1") != 0) {
    *why = "no python3 with venv: " + ReadFileText(log);
    return "";
  }
  if (Shell(python + " -m pip install --quiet h5py hdf5plugin numpy >" + log + " 2>&1") != 0) {
    *why = "pip could not install h5py and hdf5plugin: " + ReadFileText(log);
    return "";
  }
  return python;
}

void PutPieces(const Layout& layout, int shard, const std::vector<float>& slab, int tensor,
               std::vector<float>* whole) {
  const Piece* piece = layout.FindPiece(shard, tensor);
  if (piece == nullptr) return;
  const int64_t cols = layout.tensors()[tensor].cols;
  for (int64_t i = 0; i < piece->numel(); ++i) {
    const int64_t row = piece->row_first + i / piece->cols();
    const int64_t col = piece->col_first + i % piece->cols();
    (*whole)[row * cols + col] = slab[piece->offset + i];
  }
}

// Writes tensors as the master is to show them: EXPECTED/KIND/NAME.f32.
void WriteExpected(const Layout& layout, int64_t position, const std::string& dir) {
  const State state = StateAt(layout, position);
  const auto gradients = GradientsOf(layout, position);
  for (const char* kind : {"g", "p", "m", "v", "partial_p"}) {
    std::filesystem::create_directories(dir + "/" + kind);
    const std::string name = kind;
    for (size_t t = 0; t < layout.tensors().size(); ++t) {
      if (name == "partial_p" && t != 0) continue;
      std::vector<float> whole(layout.tensors()[t].numel());
      for (int s = 0; s < layout.shards(); ++s) {
        const auto& slabs = state.shards[s].slabs;
        const int c = name == "m" ? 1 : name == "v" ? 2 : 0;
        PutPieces(layout, s, name == "g" ? gradients[s] : slabs[c], static_cast<int>(t), &whole);
      }
      WriteFileText(dir + "/" + kind + "/" + layout.tensors()[t].name + ".f32",
                    {reinterpret_cast<const char*>(whole.data()), whole.size() * sizeof(float)});
    }
  }
}

TEST(H5py, ShowsWholeTensorsUnderTheirNames) {
  std::string why;
  const std::string python = Python(&why);
  if (python.empty()) GTEST_SKIP() << why;
  const TempDir temp;
  ASSERT_TRUE(GoOn(temp / "run", 2).ok());
  WriteExpected(SmallLayout(), 2, temp / "expected");
  const std::string log = temp / "log";
  EXPECT_EQ(0, Shell(python + " " + SourceDir() + "/tests/read_master.py " + (temp / "run/steps/") +
                   MasterFileName(2, 1) + " " + (temp / "expected") + " >" + log + " 2>&1"))
      << ReadFileText(log);
}

}  // namespace
}  // namespace retrace
