#include "formats/hdf5_image.h"

#include <hdf5.h>
#include <zstd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>

#include "formats/chunk_codec.h"

namespace retrace {
namespace {

constexpr H5Z_filter_t kZstdFilter = 32015;

// Closes an HDF5 handle of whatever kind.
class Handle {
 public:
  Handle() = default;
  explicit Handle(hid_t id) : id_(id) {}
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, H5I_INVALID_HID)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Handle() {
    if (id_ >= 0) H5Idec_ref(id_);
  }
  bool ok() const { return id_ >= 0; }
  operator hid_t() const { return id_; }  // NOLINT: it is one

 private:
  hid_t id_ = H5I_INVALID_HID;
};

// HDF5's filter callback for zstd: libraries that read through HDF5 in this process need it, and
// H5Dcreate asks for it. Our own data paths compress and decompress by themselves.
size_t ZstdFilter(unsigned flags, size_t, const unsigned*, size_t nbytes, size_t* buf_size,
                  void** buf) {
  const bool decode = (flags & H5Z_FLAG_REVERSE) != 0;
  const unsigned long long size =
      decode ? ZSTD_getFrameContentSize(*buf, nbytes) : ZSTD_compressBound(nbytes);
  if (size == ZSTD_CONTENTSIZE_ERROR || size == ZSTD_CONTENTSIZE_UNKNOWN) return 0;
  void* out = H5allocate_memory(size, false);
  if (out == nullptr) return 0;
  const size_t done = decode ? ZSTD_decompress(out, size, *buf, nbytes)
                             : ZSTD_compress(out, size, *buf, nbytes, kTextLevel);
  if (ZSTD_isError(done)) {
    H5free_memory(out);
    return 0;
  }
  H5free_memory(*buf);
  *buf = out;
  *buf_size = size;
  return done;
}

// Held during every use of HDF5.
class Hdf5Lock {
 public:
  Hdf5Lock() : lock_(Mutex()) {
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // the error stack belongs to the thread
    static const herr_t registered = H5Zregister(&kFilterClass);
    RT_CHECK(registered >= 0);
  }

 private:
  static std::mutex& Mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static constexpr H5Z_class2_t kFilterClass = {
      H5Z_CLASS_T_VERS, kZstdFilter, 1, 1, "zstd", nullptr, nullptr, &ZstdFilter};
  std::unique_lock<std::mutex> lock_;
};

// The memory behind an image, as HDF5's in-memory driver sees it: it grows while a file is built
// and outlives the driver; a lent one is handed out as it is and never changes.
struct Memory {
  void* data = nullptr;
  bool lent = false;
  size_t capacity = 0;
  size_t used = 0;  // handed out so far
};

// Hands out at least `size` bytes. Those that are new are zeros, since HDF5 leaves gaps: equal
// content gives equal bytes.
void* Grow(Memory* memory, size_t size) {
  if (size > memory->capacity) {
    void* grown = std::realloc(memory->data, size);
    if (grown == nullptr) return nullptr;
    memory->data = grown;
    memory->capacity = size;
  }
  if (size > memory->used) {
    std::memset(static_cast<char*>(memory->data) + memory->used, 0, size - memory->used);
    memory->used = size;
  }
  return memory->data;
}

void* ImageMalloc(size_t size, H5FD_file_image_op_t, void* udata) {
  Memory* memory = static_cast<Memory*>(udata);
  return memory->lent ? memory->data : Grow(memory, size);
}

void* ImageCopy(void* to, const void*, size_t, H5FD_file_image_op_t, void*) { return to; }

void* ImageRealloc(void*, size_t size, H5FD_file_image_op_t, void* udata) {
  Memory* memory = static_cast<Memory*>(udata);
  return memory->lent ? nullptr : Grow(memory, size);
}

herr_t ImageFree(void*, H5FD_file_image_op_t, void*) { return 0; }  // it outlives the driver
void* UdataCopy(void* udata) { return udata; }
herr_t UdataFree(void*) { return 0; }

// Properties of a file that lives in `memory`.
Handle ImageAccess(size_t increment_bytes, Memory* memory) {
  Handle access(H5Pcreate(H5P_FILE_ACCESS));
  H5FD_file_image_callbacks_t callbacks = {ImageMalloc, ImageCopy, ImageRealloc, ImageFree,
                                           UdataCopy,   UdataFree, memory};
  const bool good = H5Pset_fapl_core(access, increment_bytes, false) >= 0 &&
                    H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110) >= 0 &&
                    H5Pset_fclose_degree(access, H5F_CLOSE_STRONG) >= 0 &&
                    H5Pset_file_image_callbacks(access, &callbacks) >= 0;
  return good ? std::move(access) : Handle();
}

// The driver takes files of one name for one file, and looks for it on disk first: a name that is
// new each time and that no disk can have.
std::string ImageName() {
  static std::atomic<uint64_t> next{0};
  return "/dev/null/retrace-image-" + std::to_string(next++);
}

Handle WithoutTimes(hid_t property_class) {
  Handle properties(H5Pcreate(property_class));
  return H5Pset_obj_track_times(properties, false) >= 0 ? std::move(properties) : Handle();
}

// Where the superblock (version 2 and 3) says that the file ends.
uint64_t EndOfFile(const char* image) {
  constexpr size_t kEndOfFileOffset = 28;
  uint64_t end = 0;
  std::memcpy(&end, image + kEndOfFileOffset, sizeof end);
  return end;
}

Status Hdf5Error(const std::string& what) {
  return FailedError("HDF5 could not " + what + " in memory; is memory exhausted?");
}

}  // namespace

struct Hdf5Builder::Open {
  Memory memory;
  Handle file;
  Handle dataset;  // the one that chunks go to

  ~Open() {
    const Hdf5Lock lock;
    dataset = Handle();
    file = Handle();
    std::free(memory.data);
  }
};

Hdf5Builder::Hdf5Builder(std::unique_ptr<Open> open) : open_(std::move(open)) {}
Hdf5Builder::Hdf5Builder(Hdf5Builder&&) noexcept = default;
Hdf5Builder::~Hdf5Builder() = default;

Result<Hdf5Builder> Hdf5Builder::Make(size_t increment_bytes, Bytes memory) {
  auto open = std::make_unique<Open>();
  open->memory.capacity = memory.data ? memory.capacity : 0;
  open->memory.data = memory.data.release();
  {
    const Hdf5Lock lock;
    const Handle access = ImageAccess(increment_bytes, &open->memory);
    const Handle create = WithoutTimes(H5P_FILE_CREATE);
    open->file = Handle(H5Fcreate(ImageName().c_str(), H5F_ACC_TRUNC, create, access));
    if (open->file.ok()) return Hdf5Builder(std::move(open));
  }
  return Hdf5Error("create a file");
}

Status Hdf5Builder::AddGroup(const std::string& path) {
  const Hdf5Lock lock;
  const Handle create = WithoutTimes(H5P_GROUP_CREATE);
  const Handle group(H5Gcreate2(open_->file, path.c_str(), H5P_DEFAULT, create, H5P_DEFAULT));
  return group.ok() ? Status() : Hdf5Error("add the group " + path);
}

Status Hdf5Builder::AddText(const std::string& path, size_t text_size,
                            std::string_view compressed) {
  const Hdf5Lock lock;
  const hsize_t size = text_size, first = 0;
  const unsigned level = kTextLevel;
  const Handle create = WithoutTimes(H5P_DATASET_CREATE);
  const Handle space(H5Screate_simple(1, &size, nullptr));
  if (H5Pset_chunk(create, 1, &size) < 0 ||
      H5Pset_filter(create, kZstdFilter, H5Z_FLAG_MANDATORY, 1, &level) < 0) {
    return Hdf5Error("describe " + path);
  }
  const Handle dataset(
      H5Dcreate2(open_->file, path.c_str(), H5T_STD_U8LE, space, H5P_DEFAULT, create, H5P_DEFAULT));
  const bool good = dataset.ok() && H5Dwrite_chunk(dataset, H5P_DEFAULT, 0, &first,
                                                   compressed.size(), compressed.data()) >= 0;
  return good ? Status() : Hdf5Error("write " + path);
}

Status Hdf5Builder::AddFloats(const std::string& path, int64_t numel, int64_t chunk_elements) {
  const Hdf5Lock lock;
  const hsize_t size = numel, chunk = chunk_elements;
  const unsigned level = kTextLevel;
  const Handle create = WithoutTimes(H5P_DATASET_CREATE);
  const Handle space(H5Screate_simple(1, &size, nullptr));
  if (H5Pset_chunk(create, 1, &chunk) < 0 || H5Pset_shuffle(create) < 0 ||
      H5Pset_filter(create, kZstdFilter, H5Z_FLAG_MANDATORY, 1, &level) < 0) {
    return Hdf5Error("describe " + path);
  }
  open_->dataset = Handle(H5Dcreate2(open_->file, path.c_str(), H5T_IEEE_F32LE, space, H5P_DEFAULT,
                                     create, H5P_DEFAULT));
  return open_->dataset.ok() ? Status() : Hdf5Error("add " + path);
}

Result<uint64_t> Hdf5Builder::WriteChunk(int64_t first_element, std::string_view encoded) {
  const Hdf5Lock lock;
  const hsize_t first = first_element;
  haddr_t place = HADDR_UNDEF;
  hsize_t size = 0;
  const bool good =
      H5Dwrite_chunk(open_->dataset, H5P_DEFAULT, 0, &first, encoded.size(), encoded.data()) >= 0 &&
      H5Dget_chunk_info_by_coord(open_->dataset, &first, nullptr, &place, &size) >= 0;
  if (!good || place == HADDR_UNDEF || size != encoded.size()) return Hdf5Error("write a chunk");
  return uint64_t{place};
}

namespace {

// Adds one piece to a virtual dataset: rectangle of the whole <- run of a flat dataset.
bool MapPiece(hid_t create, hid_t whole, bool vector, const VirtualPiece& piece) {
  const hsize_t first[] = {static_cast<hsize_t>(piece.row_first),
                           static_cast<hsize_t>(piece.col_first)};
  const hsize_t extent[] = {static_cast<hsize_t>(piece.rows), static_cast<hsize_t>(piece.cols)};
  const hsize_t numel = piece.dataset_numel, offset = piece.offset, run = extent[0] * extent[1];
  const int skip = vector ? 1 : 0;  // a vector has columns only
  const Handle source(H5Screate_simple(1, &numel, nullptr));
  return H5Sselect_hyperslab(whole, H5S_SELECT_SET, first + skip, nullptr, extent + skip,
                             nullptr) >= 0 &&
         H5Sselect_hyperslab(source, H5S_SELECT_SET, &offset, nullptr, &run, nullptr) >= 0 &&
         H5Pset_virtual(create, whole, piece.file.c_str(), piece.dataset.c_str(), source) >= 0;
}

}  // namespace

Status Hdf5Builder::AddVirtual(const std::string& path, int64_t rows, int64_t cols, bool vector,
                               const std::vector<VirtualPiece>& pieces) {
  const Hdf5Lock lock;
  const hsize_t shape[] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(cols)};
  const float fill = std::numeric_limits<float>::quiet_NaN();
  const Handle create = WithoutTimes(H5P_DATASET_CREATE);
  const Handle space(H5Screate_simple(vector ? 1 : 2, shape + (vector ? 1 : 0), nullptr));
  bool good = H5Pset_fill_value(create, H5T_NATIVE_FLOAT, &fill) >= 0;
  for (const VirtualPiece& piece : pieces) good = good && MapPiece(create, space, vector, piece);
  H5Sselect_all(space);
  const Handle dataset(good ? H5Dcreate2(open_->file, path.c_str(), H5T_IEEE_F32LE, space,
                                         H5P_DEFAULT, create, H5P_DEFAULT)
                            : H5I_INVALID_HID);
  return dataset.ok() ? Status() : Hdf5Error("map " + path);
}

Status Hdf5Builder::AddPlainFloats(const std::string& path, const std::vector<int64_t>& shape,
                                   const std::vector<float>& values) {
  const Hdf5Lock lock;
  const std::vector<hsize_t> extent(shape.begin(), shape.end());
  const Handle create = WithoutTimes(H5P_DATASET_CREATE);
  const Handle space(H5Screate_simple(static_cast<int>(extent.size()), extent.data(), nullptr));
  const Handle dataset(H5Dcreate2(open_->file, path.c_str(), H5T_IEEE_F32LE, space, H5P_DEFAULT,
                                  create, H5P_DEFAULT));
  const bool good = dataset.ok() && H5Dwrite(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL,
                                             H5P_DEFAULT, values.data()) >= 0;
  return good ? Status() : Hdf5Error("write " + path);
}

Status Hdf5Builder::AddAttribute(const std::string& name, const std::string& text) {
  const Hdf5Lock lock;
  const Handle type(H5Tcopy(H5T_C_S1));
  const Handle space(H5Screate(H5S_SCALAR));
  if (H5Tset_size(type, text.size() + 1) < 0 || H5Tset_cset(type, H5T_CSET_UTF8) < 0) {
    return Hdf5Error("describe " + name);
  }
  const Handle attribute(
      H5Acreate2(open_->file, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT));
  const bool good = attribute.ok() && H5Awrite(attribute, type, text.c_str()) >= 0;
  return good ? Status() : Hdf5Error("write the attribute " + name);
}

Result<Bytes> Hdf5Builder::Finish() {
  const Hdf5Lock lock;
  open_->dataset = Handle();
  const bool flushed = H5Fflush(open_->file, H5F_SCOPE_GLOBAL) >= 0;
  open_->file = Handle();
  if (!flushed || open_->memory.data == nullptr) return Hdf5Error("finish a file");
  Bytes bytes;
  bytes.data.reset(static_cast<char*>(std::exchange(open_->memory.data, nullptr)));
  bytes.capacity = std::exchange(open_->memory.capacity, 0);
  bytes.size = EndOfFile(bytes.data.get());
  return bytes;
}

namespace {

// Reads the whole of a 1-D uint8 dataset.
bool ReadAll(hid_t dataset, std::string* text) {
  const Handle space(H5Dget_space(dataset)), type(H5Dget_type(dataset));
  hsize_t size = 0;
  if (H5Sget_simple_extent_ndims(space) != 1 ||
      H5Sget_simple_extent_dims(space, &size, nullptr) < 0 || H5Tequal(type, H5T_STD_U8LE) <= 0) {
    return false;
  }
  constexpr hsize_t kMost = hsize_t{1} << 32;
  if (size > kMost) return false;
  text->resize(size);
  return H5Dread(dataset, H5T_NATIVE_UINT8, H5S_ALL, H5S_ALL, H5P_DEFAULT, text->data()) >= 0;
}

constexpr int kDepthMax = 16;
constexpr int64_t kElementsMax = int64_t{1} << 40;

class TensorReader {
 public:
  TensorReader(std::string name, std::vector<Hdf5Tensor>* tensors)
      : name_(std::move(name)), tensors_(*tensors) {}

  Status ReadGroup(hid_t group, const std::string& path, int depth) {
    if (depth > kDepthMax) return DamagedError(name_ + ": groups within groups without end");
    H5G_info_t info;
    if (H5Gget_info(group, &info) < 0) return Damaged(path);
    for (hsize_t i = 0; i < info.nlinks; ++i) {
      std::string link(1024, '\0');
      const ssize_t size = H5Lget_name_by_idx(group, ".", H5_INDEX_NAME, H5_ITER_INC, i,
                                              link.data(), link.size(), H5P_DEFAULT);
      if (size <= 0 || size >= static_cast<ssize_t>(link.size())) return Damaged(path);
      link.resize(size);
      const Handle object(H5Oopen(group, link.c_str(), H5P_DEFAULT));
      if (!object.ok()) return Damaged(path + link);
      const H5I_type_t type = H5Iget_type(object);
      if (type == H5I_GROUP) RT_RETURN_IF_ERROR(ReadGroup(object, path + link + "/", depth + 1));
      if (type == H5I_DATASET) RT_RETURN_IF_ERROR(ReadDataset(object, path + link));
    }
    return {};
  }

 private:
  Status Damaged(const std::string& path) const {
    return DamagedError(name_ + ": HDF5 can not read '" + path + "'");
  }

  Status ReadDataset(hid_t dataset, const std::string& path) {
    const Handle type(H5Dget_type(dataset)), space(H5Dget_space(dataset));
    const Handle create(H5Dget_create_plist(dataset));
    if (!type.ok() || !space.ok() || !create.ok()) return Damaged(path);
    if (H5Tget_class(type) != H5T_FLOAT) return {};
    if (H5Pget_layout(create) == H5D_VIRTUAL) {
      return UnsupportedError(name_ + ": '" + path +
                              "' is a view into other files; name the state of "
                              "its run instead: RUN@k");
    }
    Hdf5Tensor tensor;
    tensor.path = path;
    tensor.fp64 = H5Tget_size(type) > sizeof(float);
    const int rank = H5Sget_simple_extent_ndims(space);
    std::vector<hsize_t> extent(std::max(rank, 0));
    if (rank < 0 || H5Sget_simple_extent_dims(space, extent.data(), nullptr) < 0) {
      return Damaged(path);
    }
    int64_t numel = 1;
    for (hsize_t size : extent) {
      if (size > static_cast<hsize_t>(kElementsMax) ||
          __builtin_mul_overflow(numel, static_cast<int64_t>(size), &numel) ||
          numel > kElementsMax) {
        return Damaged(path);
      }
      tensor.shape.push_back(static_cast<int64_t>(size));
    }
    if (tensor.fp64)
      tensor.doubles.resize(numel);
    else
      tensor.floats.resize(numel);
    void* data = tensor.fp64 ? static_cast<void*>(tensor.doubles.data()) : tensor.floats.data();
    if (H5Dread(dataset, tensor.fp64 ? H5T_NATIVE_DOUBLE : H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL,
                H5P_DEFAULT, data) < 0) {
      return Damaged(path);
    }
    tensors_.push_back(std::move(tensor));
    return {};
  }

  const std::string name_;
  std::vector<Hdf5Tensor>& tensors_;
};

}  // namespace

Result<std::vector<Hdf5Tensor>> ReadHdf5Tensors(std::string_view image, const std::string& name) {
  if (image.empty()) return DamagedError(name + ": an empty file");
  const Hdf5Lock lock;
  Memory memory{.data = const_cast<char*>(image.data()), .lent = true};
  const Handle access = ImageAccess(size_t{1} << 16, &memory);
  if (H5Pset_file_image(access, memory.data, image.size()) < 0) return Hdf5Error("lend " + name);
  const Handle file(H5Fopen(ImageName().c_str(), H5F_ACC_RDONLY, access));
  if (!file.ok()) return DamagedError(name + ": not an HDF5 file, or a damaged one");
  std::vector<Hdf5Tensor> tensors;
  const Handle root(H5Gopen2(file, "/", H5P_DEFAULT));
  RT_RETURN_IF_ERROR(TensorReader(name, &tensors).ReadGroup(root, "", 0));
  return tensors;
}

Result<std::string> ReadHdf5Text(std::string_view image, const std::string& path,
                                 const std::string& name) {
  const Hdf5Lock lock;
  Memory memory{.data = const_cast<char*>(image.data()), .lent = true};
  const Handle access = ImageAccess(size_t{1} << 16, &memory);
  if (H5Pset_file_image(access, memory.data, image.size()) < 0) return Hdf5Error("lend " + name);
  const Handle file(H5Fopen(ImageName().c_str(), H5F_ACC_RDONLY, access));
  const Handle dataset(file.ok() ? H5Dopen2(file, path.c_str(), H5P_DEFAULT) : H5I_INVALID_HID);
  std::string text;
  if (!dataset.ok() || !ReadAll(dataset, &text)) {
    return DamagedError(name + ": expected an HDF5 file with the text dataset " + path +
                        ", got something else");
  }
  return text;
}

}  // namespace retrace
