// HDF5 files as images in memory. The only place that calls HDF5; used by step_file.cc.
//
// A file is built in memory and its finished bytes are handed over without a copy, so that they are
// digested and published by the store's own file operations: a failing disk never reaches HDF5,
// which can neither close a file that it can not write nor forget it. For reading, bytes whose digest
// was verified are lent to HDF5: a damaged file never reaches it either.
//
// HDF5 runs in one thread at a time (one process-wide lock, taken per call), its error stack is
// silent, its file locking is not used. Format bounds V110, no times: equal content, equal bytes.
#ifndef RETRACE_FORMATS_HDF5_IMAGE_H_
#define RETRACE_FORMATS_HDF5_IMAGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "formats/file_ops.h"

namespace retrace {

// A rectangle of a whole tensor and where its elements lie: a run of a 1-D dataset of another file
// of the same folder.
struct VirtualPiece {
  int64_t row_first = 0, col_first = 0, rows = 0, cols = 0;
  std::string file, dataset;
  int64_t offset = 0, dataset_numel = 0;  // elements
};

class Hdf5Builder {
 public:
  // increment_bytes: by how much the image grows at a time. memory: used again, whatever it holds.
  static Result<Hdf5Builder> Make(size_t increment_bytes, Bytes memory = Bytes());
  Hdf5Builder(Hdf5Builder&&) noexcept;
  ~Hdf5Builder();

  Status AddGroup(const std::string& path);
  // 1-D uint8, zstd, one chunk; `compressed` is the text's zstd frame.
  Status AddText(const std::string& path, size_t text_size, std::string_view compressed);
  // 1-D float32, byte shuffle + zstd; follow with WriteChunk for all its chunks.
  Status AddFloats(const std::string& path, int64_t numel, int64_t chunk_elements);
  // An encoded chunk of the dataset added last. -> its place in the image.
  Result<uint64_t> WriteChunk(int64_t first_element, std::string_view encoded);
  // 2-D (or 1-D of `cols`) float32 made of pieces; NaN where a piece's file is missing.
  Status AddVirtual(const std::string& path, int64_t rows, int64_t cols, bool vector,
                    const std::vector<VirtualPiece>& pieces);
  // float32 as it is: neither chunked nor compressed, so that any HDF5 reader opens it.
  Status AddPlainFloats(const std::string& path, const std::vector<int64_t>& shape,
                        const std::vector<float>& values);
  // A text attribute of the file.
  Status AddAttribute(const std::string& name, const std::string& text);
  Result<Bytes> Finish();

 private:
  struct Open;
  explicit Hdf5Builder(std::unique_ptr<Open> open);
  std::unique_ptr<Open> open_;
};

// The text dataset `path` of an image. `name` stands in messages.
// Errors: kDamaged where it is not there or not what AddText writes.
Result<std::string> ReadHdf5Text(std::string_view image, const std::string& path,
                                 const std::string& name);

// A dataset of floating-point numbers of any HDF5 file.
struct Hdf5Tensor {
  std::string path;  // "p/model.norm.weight"
  std::vector<int64_t> shape;
  bool fp64 = false;
  std::vector<float> floats;    // where it is not
  std::vector<double> doubles;  // where it is
};

// All of them, by path; other datasets are left out. For files of unknown origin: HDF5 has been seen
// to crash on damaged ones, so a caller tries this in a process of its own first.
// Errors: kDamaged; kUnsupported for a virtual dataset, whose elements lie in other files.
Result<std::vector<Hdf5Tensor>> ReadHdf5Tensors(std::string_view image, const std::string& name);

}  // namespace retrace

#endif  // RETRACE_FORMATS_HDF5_IMAGE_H_
