// Level native on processors: products by MKL, functions by ATen's vectorised kernels. On CUDA the
// same calls would reach cuBLASLt, but no engine keeps its tensors there yet.
//
// Whatever ATen splits among threads it splits by shapes and by the number of its threads, which is
// pinned; every call gets a whole op, so neither retrace's threads nor ranks move a boundary.
#include "replay/torch/native_level.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/div.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <torch/csrc/api/include/torch/version.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <type_traits>

#include "core/check.h"

namespace retrace {
namespace {

int g_threads = 0;  // pinned

template <class T>
constexpr at::ScalarType kType = std::is_same_v<T, float> ? at::kFloat : at::kDouble;

template <class T>
at::Tensor View(const T* data, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::from_blob(const_cast<T*>(data), sizes, strides, at::TensorOptions(kType<T>));
}

template <class T>
at::Tensor Flat(const T* data, int64_t first, int64_t last) {
  return View(data + first, {last - first}, {1});
}

template <class T>
at::Tensor Rows(const T* data, int64_t first, int64_t last, int64_t n) {
  return View(data + first * n, {last - first, n}, {n, 1});
}

// By a point of the precision policy.
at::Tensor Rounded(const at::Tensor& x, Rounding round) {
  return round == Rounding::kNone ? x : x.to(at::kBFloat16).to(x.scalar_type());
}

// Somebody else in the process may have changed it; then the bits would be others.
void CheckThreads() { RT_CHECK_EQ(at::get_num_threads(), g_threads); }

// ---------------------------------------------------------------------------------------- products

template <class T>
void MultiplyOne(const GemmArgs<T>& args) {
  if (args.m == 0 || args.n == 0) return;
  const at::Tensor a = View(args.a, {args.m, args.k}, {args.a_row_stride, args.a_col_stride});
  const at::Tensor b = View(args.b, {args.k, args.n}, {args.b_row_stride, args.b_col_stride});
  at::Tensor c = View(args.c, {args.m, args.n}, {args.c_row_stride, 1});
  if (!args.add && args.round == Rounding::kNone) {
    at::mm_out(c, a, b);
    return;
  }
  const at::Tensor product = Rounded(at::mm(a, b), args.round);
  if (args.add) c.add_(product);
  else c.copy_(product);
}

template <class T>
void Multiply(std::span<const GemmArgs<T>> products) {
  const c10::InferenceMode guard;
  CheckThreads();
  for (const GemmArgs<T>& args : products) MultiplyOne(args);
}

// --------------------------------------------------------------------------------------------- ops

template <class T>
void RmsNorm(const RmsNormArgs<T>& args, int64_t first, int64_t last) {
  const c10::InferenceMode guard;
  const at::Tensor x = Rows(args.x_RN, first, last, args.n);
  at::Tensor r = Flat(args.r_R, first, last);
  at::Tensor mean = at::mul(x, x).sum(1).div_(static_cast<double>(args.n));
  at::rsqrt_out(r, mean.add_(static_cast<double>(args.eps)));
  at::Tensor y = at::mul(x, r.unsqueeze(1));
  if (args.w_N != nullptr) y.mul_(View(args.w_N, {args.n}, {1}));
  Rows(args.y_RN, first, last, args.n).copy_(Rounded(y, args.round));
}

// Which keys each row sees: [rows, length].
at::Tensor Unseen(int64_t first, int64_t last, int64_t length, int64_t window) {
  const at::Tensor key = at::arange(length, at::kLong);
  const at::Tensor query = at::arange(first, last, at::kLong).remainder(length).unsqueeze(1);
  at::Tensor unseen = key.gt(query);
  if (window > 0) unseen = unseen.logical_or(key.le(query.sub(window)));
  return unseen;
}

template <class T>
void Softmax(const SoftmaxArgs<T>& args, int64_t first, int64_t last) {
  const c10::InferenceMode guard;
  const int64_t S = args.length;
  at::Tensor s = Rows(args.s_RS, first, last, S);
  if (args.scale != T(1)) {
    s.mul_(static_cast<double>(args.scale));
    if (args.round_scores != Rounding::kNone) s.copy_(Rounded(s, args.round_scores));
  }
  s.masked_fill_(Unseen(first, last, S, args.window), -std::numeric_limits<double>::infinity());
  s.copy_(at::_softmax(s, 1, false));
  if (args.p_rounded_RS != nullptr) {
    Rows(args.p_rounded_RS, first, last, S).copy_(Rounded(s, args.round));
  }
}

template <class T>
void SoftmaxBackward(const SoftmaxBackwardArgs<T>& args, int64_t first, int64_t last) {
  const c10::InferenceMode guard;
  const int64_t S = args.length;
  at::Tensor dp = Rows(args.dp_RS, first, last, S);
  const at::Tensor unseen = Unseen(first, last, S, args.window);
  dp.masked_fill_(unseen, 0);  // what an unseen key would give is never read
  at::Tensor ds =
      at::_softmax_backward_data(dp, Rows(args.p_RS, first, last, S), 1, dp.scalar_type());
  ds = Rounded(ds, args.round);
  if (args.scale != T(1)) {
    ds = Rounded(at::mul(ds, static_cast<double>(args.scale)), args.round);
  }
  dp.copy_(ds.masked_fill(unseen, 0));
}

template <class T>
void Geglu(const GegluArgs<T>& args, int64_t first, int64_t last) {
  const c10::InferenceMode guard;
  const at::Tensor gelu =
      Rounded(at::gelu(Flat(args.gate, first, last), "tanh"), args.round_gelu);
  Flat(args.act, first, last)
      .copy_(Rounded(at::mul(gelu, Flat(args.up, first, last)), args.round_product));
}

template <class T>
void GegluBackward(const GegluBackwardArgs<T>& args, int64_t first, int64_t last) {
  const c10::InferenceMode guard;
  const at::Tensor gate = Flat(args.gate, first, last), up = Flat(args.up, first, last);
  const at::Tensor da = Flat(args.dact, first, last);
  const at::Tensor gelu = Rounded(at::gelu(gate, "tanh"), args.round_gelu);
  const at::Tensor dgelu = Rounded(at::mul(da, up), args.round_dgelu);
  const at::Tensor dgate = Rounded(at::gelu_backward(dgelu, gate, "tanh"), args.round);
  const at::Tensor dup = Rounded(at::mul(da, gelu), args.round);
  Flat(args.dgate, first, last).copy_(dgate);  // may be gate's buffer, dup up's
  Flat(args.dup, first, last).copy_(dup);
}

template <class T>
void Softcap(const SoftcapArgs<T>& args, int64_t first, int64_t last) {
  const c10::InferenceMode guard;
  at::Tensor z = Flat(args.z, first, last);
  const double cap = static_cast<double>(args.cap);
  const at::Tensor tanh = Rounded(at::tanh(Rounded(at::div(z, cap), args.round)), args.round);
  Flat(args.tanh, first, last).copy_(tanh);
  z.copy_(Rounded(at::mul(tanh, cap), args.round));
}

// d(cap * tanh(z / cap)) = (1 - tanh^2) dz, in the steps of the portable op.
template <class T>
void SoftcapBackward(const SoftcapBackwardArgs<T>& args, int64_t first, int64_t last) {
  const c10::InferenceMode guard;
  at::Tensor dz = Flat(args.dz, first, last);
  const at::Tensor th = Flat(args.tanh, first, last);
  const double cap = static_cast<double>(args.cap);
  const at::Tensor slope = at::mul(th, th).neg_().add_(1);
  const at::Tensor scaled = Rounded(at::mul(dz, cap), args.round);
  dz.copy_(Rounded(at::div(Rounded(at::mul(scaled, slope), args.round), cap), args.round));
}

template <class T>
void SumExp(const SumExpArgs<T>& args, int64_t first, int64_t last) {
  const c10::InferenceMode guard;
  const at::Tensor z = Rows(args.z_TV, first, last, args.n);
  const at::Tensor m = Flat(args.m_T, first, last).unsqueeze(1);
  Flat(args.sum_T, first, last).copy_(at::exp(at::sub(z, m)).sum(1));
  for (int64_t t = first; t < last; ++t) {
    const int64_t label = args.labels_T[t] - args.row_first;
    args.label_T[t] = label >= 0 && label < args.n ? args.z_TV[t * args.n + label] : T(0);
  }
}

template <class T>
OpTable<T> NativeOps() {
  OpTable<T> ops = {};
  ops.rms_norm = RmsNorm<T>;
  ops.softmax = Softmax<T>;
  ops.softmax_backward = SoftmaxBackward<T>;
  ops.geglu = Geglu<T>;
  ops.geglu_backward = GegluBackward<T>;
  ops.softcap = Softcap<T>;
  ops.softcap_backward = SoftcapBackward<T>;
  ops.sum_exp = SumExp<T>;
  return ops;
}

// ------------------------------------------------------------------------------------ environment

// torch_plugin.cc sets these before it opens the plug-in, unless they are set: MKL reads them once.
struct Pinned {
  const char* name;
  const char* value;  // null: has to be absent
};
constexpr Pinned kPinned[] = {{"MKL_CBWR", "AUTO"},
                              {"MKL_DYNAMIC", "FALSE"},
                              {"OMP_DYNAMIC", "FALSE"},
                              {"CUBLAS_WORKSPACE_CONFIG", ":4096:8"},
                              {"NVIDIA_TF32_OVERRIDE", "0"},
                              {"ONEDNN_DEFAULT_FPMATH_MODE", "STRICT"},
                              {"MKL_ENABLE_INSTRUCTIONS", nullptr},
                              {"MKL_DEBUG_CPU_TYPE", nullptr},
                              {"ONEDNN_MAX_CPU_ISA", nullptr},
                              {"DNNL_MAX_CPU_ISA", nullptr},
                              {"ATEN_CPU_CAPABILITY", nullptr},
                              {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", nullptr}};

std::string EnvironmentError() {
  for (const Pinned& pinned : kPinned) {
    const char* got = std::getenv(pinned.name);
    const bool fine = pinned.value == nullptr
                          ? got == nullptr
                          : got != nullptr && std::strcmp(got, pinned.value) == 0;
    if (fine) continue;
    return fmt::format("the bits of level native depend on {}: expected {}, got {}. Unset it",
                       pinned.name, pinned.value ? pinned.value : "that it is not set",
                       got ? got : "nothing");
  }
  return "";
}

void PinContext(int threads) {
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  context.setDeterministicFillUninitializedMemory(false);
  context.setBenchmarkCuDNN(false);
  context.setDeterministicCuDNN(true);
  context.setAllowTF32CuDNN(false);
  context.setAllowTF32CuBLAS(false);
  context.setAllowFP16ReductionCuBLAS(false, false);
  context.setAllowBF16ReductionCuBLAS(false, false);
  context.setFlushDenormal(false);
  at::set_num_threads(threads);
  g_threads = threads;
}

std::string ContextError() {
  const at::Context& context = at::globalContext();
  if (!context.deterministicAlgorithms() || context.deterministicAlgorithmsWarnOnly()) {
    return "ATen does not refuse algorithms without a fixed order";
  }
  if (at::get_num_threads() != g_threads) {
    return fmt::format("expected {} threads in ATen, got {}", g_threads, at::get_num_threads());
  }
  return "";
}

// Large enough that MKL and OpenMP split it, odd enough that no edge is aligned.
std::string ProductError() {
  const c10::InferenceMode guard;
  const at::Tensor a = at::arange(203 * 517, at::kFloat).sin_().view({203, 517});
  const at::Tensor b = at::arange(517 * 331, at::kFloat).cos_().view({517, 331});
  const at::Tensor first = at::mm(a, b);
  for (int i = 0; i < 4; ++i) {
    const at::Tensor again = at::mm(a, b);
    if (std::memcmp(first.data_ptr(), again.data_ptr(), first.nbytes()) != 0) {
      return "the same product twice gave different bits";
    }
  }
  return "";
}

// "Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build ..." -> its number
std::string ShortVersion(const std::string& text) {
  const size_t digit = text.find_first_of("0123456789");
  if (digit == std::string::npos) return text;
  return text.substr(digit, text.find_first_of(" \n(", digit) - digit);
}

}  // namespace

const NativeKernels* OpenNativeKernels(int threads, std::string* libraries,
                                       std::string* error) try {
  static const NativeKernels kernels = {Multiply<float>, Multiply<double>, NativeOps<float>(),
                                        NativeOps<double>()};
  *error = EnvironmentError();
  if (error->empty() && g_threads != 0 && g_threads != threads) {
    *error = fmt::format("this process computes with {} native_threads already, so not with {}",
                         g_threads, threads);
  }
  if (!error->empty()) return nullptr;
  PinContext(threads);
  *error = ContextError();
  if (error->empty()) *error = ProductError();
  if (!error->empty()) return nullptr;
  *libraries = fmt::format("LibTorch {}, MKL {}, {}, MKL_CBWR=AUTO", TORCH_VERSION,
                           ShortVersion(at::get_mkl_version().substr(
                               at::get_mkl_version().find("Version"))),
                           at::get_cpu_capability());
  return &kernels;
} catch (const std::exception& e) {
  *error = std::string(e.what()).substr(0, std::string(e.what()).find('\n'));
  return nullptr;
}

}  // namespace retrace
