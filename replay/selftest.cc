#include "replay/selftest.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <memory>
#include <optional>

#include "core/philox.h"
#include "core/recipe_toml.h"
#include "kernels/op_samples.h"
#include "kernels/vector_math.h"
#include "replay/local_ranks.h"
#include "replay/random_batches.h"
#include "replay/torch_plugin.h"

namespace retrace {
namespace {

// What the machine that fixed retrace-numerics-1 gave. These change with the numerics id, and only
// then: a test says what they would be.
constexpr char kGoldenNumbers[] = "715f45e455b6c3d6cc94b1fa38c4d540";
constexpr char kGoldenUpdates[] = "3d08a6870fab25b812964abb937f9cd0";

// Small, with all that an update can have: both layer kinds, KV heads fewer than virtual shards, a
// window shorter than the sequence, several micro-batches over two lanes, softcap, evaluation.
constexpr char kRecipeText[] = R"(
name = "selftest"
steps = 3
[model]
vocab_size = 96
hidden_size = 24
intermediate_size = 40
layers = 2
query_heads = 4
kv_heads = 2
global_kv_heads = 1
head_dim = 6
global_head_dim = 8
full_attention_every = 2
sliding_window = 5
final_logit_softcapping = 5.0
layer_scalar = [0.875, 1.125]
[init]
std = 0.2
embedding_std = 0.5
[data]
path = "in memory"
sequence_length = 19
micro_batch_size = 1
micro_batches = 4
evaluation_samples = 1
[schedule]
peak = 0.01
minimum = 0.001
warmup_steps = 1
total_steps = 3
indexing = "step"
[topology]
virtual_shards = 4
lanes = 2
)";
constexpr int kUpdates = 2;

constexpr Isa kVectorIsas[] = {Isa::kAvx2, Isa::kAvx512};

// ------------------------------------------------------------------------------------- functions

struct UnaryFunction {
  const char* name;
  void (*rows)(Isa, const float*, float*, int64_t);
};
constexpr UnaryFunction kUnaryFunctions[] = {
    {"exp", ExpRows},         {"exp cut", ExpCutRows}, {"log", LogRows},
    {"tanh", TanhRows},       {"sqrt", SqrtRows},      {"round to BF16", RoundToBf16Rows},
    {"NaN", CanonicalNanRows}};

struct BinaryFunction {
  const char* name;
  void (*rows)(Isa, const float*, const float*, float*, int64_t);
};
constexpr BinaryFunction kBinaryFunctions[] = {{"max", MaxRows}, {"min", MinRows}};

constexpr UnaryFunction kLaneFunctions[] = {{"lane sum", LaneSums}, {"lane max", LaneMaxima}};

// --------------------------------------------------------------------------------------- products

template <class T>
struct Product {
  int64_t m, n, k;
  const char* layout;  // is A, is B read transposed: "NN", "NT", "TN"
  Rounding round;
  bool add, special;

  std::string Text() const {
    return fmt::format("{} {} x {} x {}{}{}", layout, m, n, k, add ? ", added" : "",
                       special ? ", special values" : "");
  }
};

template <class T>
std::vector<T> Operand(uint64_t stream, int64_t count, bool special) {
  const std::vector<float> values = SampleValues(1, stream, count, special);
  return std::vector<T>(values.begin(), values.end());
}

template <class T>
GemmArgs<T> ArgsOf(const Product<T>& p, const std::vector<T>& a, const std::vector<T>& b,
                   std::vector<T>* c) {
  const bool ta = p.layout[0] == 'T', tb = p.layout[1] == 'T';
  return {.m = p.m,
          .n = p.n,
          .k = p.k,
          .a = a.data(),
          .a_row_stride = ta ? 1 : p.k,
          .a_col_stride = ta ? p.m : 1,
          .b = b.data(),
          .b_row_stride = tb ? 1 : p.n,
          .b_col_stride = tb ? p.k : 1,
          .c = c->data(),
          .c_row_stride = p.n,
          .round = p.round,
          .add = p.add};
}

template <class T>
std::vector<Product<T>> Products() {
  constexpr int64_t kShapes[][3] = {{1, 1, 1},    {5, 3, 7},     {17, 33, 255}, {16, 32, 256},
                                    {7, 49, 257}, {63, 65, 600}, {130, 70, 64}, {4, 4, 0}};
  std::vector<Product<T>> products;
  int index = 0;
  for (const auto& shape : kShapes) {
    for (const char* layout : {"NN", "NT", "TN"}) {
      for (const bool add : {false, true}) {
        const bool rounded = std::is_same_v<T, float> && index % 3 == 0;
        products.push_back({shape[0], shape[1], shape[2], layout,
                            rounded ? Rounding::kBf16 : Rounding::kNone, add, index % 2 == 1});
        ++index;
      }
    }
  }
  return products;
}

// All NaNs are one.
template <class T>
int64_t FirstDifferent(const std::vector<T>& a, const std::vector<T>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const bool both_nan = a[i] != a[i] && b[i] != b[i];
    if (!both_nan && math::Bits(a[i]) != math::Bits(b[i])) return static_cast<int64_t>(i);
  }
  return -1;
}

// ---------------------------------------------------------------------------------------- updates

// How updates are carried, and under which overrides of the recipe.
struct Carried {
  JobOptions job;
  std::vector<std::string> overrides;
};

std::string Describe(const JobOptions& job) {
  return fmt::format("{}, {} threads, tp {}, dp {}", IsaName(job.isa), job.threads, job.tp, job.dp);
}

// ------------------------------------------------------------------------------------------- runs

// Processes that keep processors busy as long as this is there.
class OtherLoad {
 public:
  explicit OtherLoad(int processes) {
    for (int i = 0; i < processes; ++i) {
      const pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (true) __asm__ volatile("");  // a loop that the compiler keeps
      }
      if (pid > 0) pids_.push_back(pid);
    }
  }
  OtherLoad(const OtherLoad&) = delete;
  ~OtherLoad() {
    for (const pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
  }

 private:
  std::vector<pid_t> pids_;
};

class Selftest {
 public:
  explicit Selftest(const SelftestOptions& options) : options_(options) {}

  Selftest& CheckMachine() {
    CheckEnvironment();
    CheckPhilox();
    CheckNumbers();
    return *this;
  }

  Selftest& CheckIsa(Isa isa) {
    section_ = fmt::format("{} and scalar", IsaName(isa));
    if (!IsaSupported(isa)) {
      SelftestRow row = Row(section_, "all kernels", "");
      row.outcome = SelftestOutcome::kAbsent;
      row.detail = fmt::format("this processor has no {}", IsaName(isa));
      Finish(std::move(row));
      return *this;
    }
    CheckFunctions(isa);
    CheckProducts<float>(isa, options_.kernels.gemm, "matrix products, FP32");
    CheckProducts<double>(isa, options_.kernels.gemm64, "matrix products, FP64");
    CheckAdamW(isa);
    CheckSumSquares(isa);
    return CheckOps(isa);
  }

  Selftest& CheckOps(Isa isa) {
    section_ = fmt::format("{} and scalar", IsaName(isa));
    std::map<std::string, SelftestRow> rows;
    uint64_t seed = 0;
    for (const int64_t n : {1, 5, 15, 16, 17, 33, 100}) {
      for (const Rounding round : {Rounding::kNone, Rounding::kBf16}) {
        for (const int64_t window : {0, 7}) {
          for (const bool special : {false, true}) {
            ++seed;
            CheckOpSamples(isa,
                           {.rows = 5,
                            .n = n,
                            .window = window,
                            .scale = seed % 3 == 0 ? 1.0f : 0.3f,
                            .round = round,
                            .special = special,
                            .seed = seed},
                           &rows);
          }
        }
      }
    }
    for (auto& [op, row] : rows) Finish(std::move(row));
    return *this;
  }

  Selftest& CheckAllUpdates() {
    CheckUpdates("updates", {}, true);
    if (!options_.full) return *this;
    CheckUpdates("updates, bf16", {"precision.preset=bf16"}, false);
    CheckUpdates("updates, fp64", {"precision.preset=fp64"}, false);
    CheckUpdates("updates, blockwise attention", {"model.attention=blockwise"}, false);
    return *this;
  }

  Selftest& CheckThreads() {
    SelftestRow row = Row("threads", "matrix products on 1, 2 and 3 threads",
                          "clause 5: threads divide C, never a sum");
    const Isa isa = BestIsa();
    for (const Product<float>& p : Products<float>()) {
      const std::vector<float> a = Operand<float>(10, p.m * p.k, p.special);
      const std::vector<float> b = Operand<float>(11, p.k * p.n, p.special);
      const std::vector<float> c = Operand<float>(12, p.m * p.n, p.special);
      std::vector<float> expected = c;
      GemmScratch serial;
      GemmSerial(isa, ArgsOf(p, a, b, &expected), serial);
      for (const int threads : {1, 2, 3}) {
        ThreadPool pool(threads);
        std::vector<GemmScratch> scratch(threads);
        std::vector<float> got = c;
        Gemm(isa, pool, scratch, ArgsOf(p, a, b, &got));
        Compare(FirstDifferent(expected, got) < 0, fmt::format("{}, {} threads", p.Text(), threads),
                &row);
      }
    }
    Finish(std::move(row));
    return *this;
  }

  // Level native promises the same bits on this machine alone: again, under load, on any ranks.
  Selftest& CheckNative() {
    section_ = "level native";
    const Result<NativeLevel> native = OpenNativeLevel(1);
    if (!native.ok()) {
      SelftestRow row = Row(section_, "all of it", "");
      row.outcome = SelftestOutcome::kAbsent;
      row.detail = native.status().message();
      Finish(std::move(row));
      return *this;
    }
    const OtherLoad load(2);
    CheckNativeOps(*native);
    CheckNativeProducts(*native);
    CheckNativeUpdates();
    return *this;
  }

  std::vector<SelftestRow> TakeRows() { return std::move(rows_); }

 private:
  static SelftestRow Row(std::string section, std::string what, std::string why) {
    SelftestRow row;
    row.section = std::move(section);
    row.what = std::move(what);
    row.why = std::move(why);
    return row;
  }

  void Finish(SelftestRow row) {
    if (options_.row) options_.row(row);
    rows_.push_back(std::move(row));
  }

  // Notes a comparison; the first difference is told.
  static void Compare(bool same, const std::string& detail, SelftestRow* row) {
    ++row->checks;
    if (same || row->outcome == SelftestOutcome::kDiffers) return;
    row->outcome = SelftestOutcome::kDiffers;
    row->detail = detail;
  }

  static constexpr int kRepeats = 3;

  // The ops that the library computes; each sample again and again.
  void CheckNativeOps(const NativeLevel& native) {
    constexpr size_t kOps = sizeof(OpTable<float>) / sizeof(void*);
    using Pointers = std::array<void*, kOps>;
    const Pointers ops = std::bit_cast<Pointers>(native.kernels->ops);
    std::map<std::string, SelftestRow> rows;
    for (const int64_t n : {5, 33, 100}) {
      for (const OpSample& sample : OpSamples({.rows = 5, .n = n, .window = 3, .scale = 0.3f})) {
        const size_t op = IndexOfOp(sample);
        if (ops[op] == nullptr) continue;
        SelftestRow& row = rows[sample.op];
        row.section = section_;
        row.what = "op " + sample.op;
        row.why = "ATen, whole ranges, pinned threads: the same again and under load";
        const OpTable<float> table = std::bit_cast<OpTable<float>>(ops);
        const FloatArrays expected = sample.Outputs(table);
        for (int again = 0; again < kRepeats; ++again) {
          CompareArrays(expected, sample.Outputs(table), fmt::format("n {}", n), &row);
        }
      }
    }
    for (auto& [op, row] : rows) Finish(std::move(row));
  }

  // Which entry of the table a sample calls.
  static size_t IndexOfOp(const OpSample& sample) {
    static constexpr const char* kNames[] = {
        "embed", "embed_backward", "rms_norm", "rms_norm_backward", "rms_norm_weight", "rope",
        "softmax", "softmax_backward", "online_softmax", "block_backward", "row_dot", "rescale_add",
        "row_divide", "geglu", "geglu_backward", "add_scale", "scale", "softcap",
        "softcap_backward", "row_max", "sum_exp", "cross_entropy_backward", "add"};
    static_assert(std::size(kNames) == sizeof(OpTable<float>) / sizeof(void*));
    const auto at = std::find(std::begin(kNames), std::end(kNames), sample.op);
    RT_CHECK(at != std::end(kNames));
    return at - std::begin(kNames);
  }

  void CheckNativeProducts(const NativeLevel& native) {
    SelftestRow row = Row(section_, "matrix products, FP32",
                          "MKL, pinned code path and threads: the same again and under load");
    for (const Product<float>& p : Products<float>()) {
      const std::vector<float> a = Operand<float>(10, p.m * p.k, false);
      const std::vector<float> b = Operand<float>(11, p.k * p.n, false);
      const std::vector<float> c = Operand<float>(12, p.m * p.n, false);
      std::vector<float> expected = c;
      const GemmArgs<float> first = ArgsOf(p, a, b, &expected);
      native.kernels->multiply({&first, 1});
      for (int again = 0; again < kRepeats; ++again) {
        // Elsewhere in memory each time: alignment may not matter.
        std::vector<float> moved_a(again + 1), moved_b(again + 2), got = c;
        moved_a.insert(moved_a.end(), a.begin(), a.end());
        moved_b.insert(moved_b.end(), b.begin(), b.end());
        GemmArgs<float> args = ArgsOf(p, a, b, &got);
        args.a = moved_a.data() + again + 1;
        args.b = moved_b.data() + again + 2;
        native.kernels->multiply({&args, 1});
        Compare(FirstDifferent(expected, got) < 0, p.Text(), &row);
      }
    }
    Finish(std::move(row));
  }

  void CheckNativeUpdates() {
    const std::vector<std::string> overrides = {"numerics.level=native"};
    const Carried reference{{.tp = 1, .dp = 1, .threads = 1, .isa = BestIsa()}, overrides};
    SelftestRow row = Row(section_, "whole updates: again, 3 threads, 2 and 4 ranks",
                          "shapes are fixed by virtual shards, library threads by the recipe");
    const Result<std::vector<std::string>> chain = Chain(reference);
    if (!chain.ok()) {
      Compare(false, chain.status().message(), &row);
      return Finish(std::move(row));
    }
    for (const int tp : {1, 2, 4}) {
      for (const int threads : {1, 3}) {
        CompareChain({{.tp = tp, .dp = 1, .threads = threads, .isa = BestIsa()}, overrides}, *chain,
                     &row);
      }
    }
    Finish(std::move(row));
  }

  void CheckEnvironment() {
    SelftestRow row =
        Row("this machine", "floating-point control", "clause 1: to nearest even, subnormals kept");
    Compare(FloatEnvironmentIsExact(), "this thread rounds otherwise, or flushes subnormals", &row);
    Finish(std::move(row));
  }

  // The vectors that Salmon et al. publish with Philox4x32-10 (Random123, kat_vectors).
  void CheckPhilox() {
    struct Known {
      PhiloxKey key;
      PhiloxBlock counter, output;
    };
    constexpr uint32_t kOnes = 0xffffffff;
    const Known known[] = {
        {{{0, 0}}, {{0, 0, 0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        {{{kOnes, kOnes}},
         {{kOnes, kOnes, kOnes, kOnes}},
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
        {{{0xa4093822, 0x299f31d0}},
         {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}};
    SelftestRow row = Row("this machine", "Philox4x32-10", "clause 13: its authors' known answers");
    for (const Known& k : known) {
      const PhiloxBlock got = Philox4x32(k.key, k.counter);
      Compare(std::equal(std::begin(got.words), std::end(got.words), std::begin(k.output.words)),
              fmt::format("expected {:08x}..., got {:08x}...", k.output.words[0], got.words[0]),
              &row);
    }
    Finish(std::move(row));
  }

  // Normal numbers go through FP64 log, sqrt and cos; powers and exp make up the schedule and RoPE.
  void CheckNumbers() {
    const RandomStream random =
        MakeRandomStream(7, static_cast<uint32_t>(RandomPurpose::kSelftest), 0);
    std::vector<double> values;
    for (int64_t i = 0; i < 4096; ++i) {
      const double x = RandomNormal(random, i);
      for (const double y : {x, math::Exp(x), math::Log(math::Abs(x)), math::Tanh(x),
                             math::Sin(100 * x), math::Pow(1e4, x), math::PowInt(0.95, i)}) {
        values.push_back(y);
      }
    }
    const Digest got = DigestOf(values.data(), values.size() * sizeof(double));
    SelftestRow row = Row("this machine", "random numbers, FP64 functions",
                          "clauses 2, 13: as other machines gave them");
    Compare(got.Hex() == kGoldenNumbers,
            fmt::format("expected the digest {}, got {}", kGoldenNumbers, got.Hex()), &row);
    Finish(std::move(row));
  }

  void CheckFunctions(Isa isa) {
    const uint64_t stride = options_.full ? 61 : 8191;  // odd: all bits of a float get their turn
    constexpr int64_t kChunk = 1 << 16;
    std::vector<float> x(kChunk), expected(kChunk), got(kChunk);
    for (const UnaryFunction& f : kUnaryFunctions) {
      SelftestRow row = Row(section_, std::string("function ") + f.name,
                            "clause 2: +, -, x, /, sqrt, fma alone, one text for all");
      for (uint64_t bits = 0; bits < uint64_t{1} << 32;) {
        int64_t n = 0;
        for (; n < kChunk && bits < uint64_t{1} << 32; bits += stride) {
          x[n++] = std::bit_cast<float>(static_cast<uint32_t>(bits));
        }
        f.rows(Isa::kScalar, x.data(), expected.data(), n);
        f.rows(isa, x.data(), got.data(), n);
        const int64_t at = FirstBitDifference({expected.begin(), expected.begin() + n},
                                              {got.begin(), got.begin() + n});
        Compare(at < 0,
                at < 0
                    ? ""
                    : fmt::format("of {:a}: expected {:a}, got {:a}", x[at], expected[at], got[at]),
                &row);
        row.checks += n - 1;
      }
      Finish(std::move(row));
    }
    CheckOrderFunctions(isa);
  }

  void CheckOrderFunctions(Isa isa) {
    constexpr int64_t kCount = 4096;
    const std::vector<float> a = SampleValues(2, 0, 16 * kCount, true);
    const std::vector<float> b = SampleValues(2, 1, 16 * kCount, true);
    SelftestRow row =
        Row(section_, "max, min, lanes", "clauses 1, 6: NaN wins, 16 lanes whatever the machine");
    std::vector<float> expected(kCount), got(kCount);
    const auto compare = [&](const char* name) {
      const int64_t at = FirstBitDifference(expected, got);
      Compare(at < 0,
              at < 0 ? "" : fmt::format("{}: expected {:a}, got {:a}", name, expected[at], got[at]),
              &row);
      row.checks += kCount - 1;
    };
    for (const BinaryFunction& f : kBinaryFunctions) {
      f.rows(Isa::kScalar, a.data(), b.data(), expected.data(), kCount);
      f.rows(isa, a.data(), b.data(), got.data(), kCount);
      compare(f.name);
    }
    for (const UnaryFunction& f : kLaneFunctions) {
      f.rows(Isa::kScalar, a.data(), expected.data(), kCount);
      f.rows(isa, a.data(), got.data(), kCount);
      compare(f.name);
    }
    Finish(std::move(row));
  }

  template <class T>
  void CheckProducts(Isa isa, void (*gemm)(Isa, const GemmArgs<T>&, GemmScratch&),
                     const char* what) {
    SelftestRow row = Row(section_, what, "clause 5: vectorised over i and j, never over k");
    GemmScratch scratch;
    for (const Product<T>& p : Products<T>()) {
      const std::vector<T> a = Operand<T>(10, p.m * p.k, p.special);
      const std::vector<T> b = Operand<T>(11, p.k * p.n, p.special);
      std::vector<T> expected = Operand<T>(12, p.m * p.n, p.special), got = expected;
      gemm(Isa::kScalar, ArgsOf(p, a, b, &expected), scratch);
      gemm(isa, ArgsOf(p, a, b, &got), scratch);
      const int64_t at = FirstDifferent(expected, got);
      Compare(at < 0,
              at < 0 ? ""
                     : fmt::format("{}, element {}: expected {:a}, got {:a}", p.Text(), at,
                                   expected[at], got[at]),
              &row);
    }
    Finish(std::move(row));
  }

  void CheckAdamW(Isa isa) {
    SelftestRow row = Row(section_, "AdamW", "clause 12: no fma, every operation rounded");
    const OptimizerRow update = {.t = 3,
                                 .lr = 1e-3f,
                                 .beta1 = 0.9f,
                                 .one_minus_beta1 = 0.1f,
                                 .beta2 = 0.95f,
                                 .one_minus_beta2 = 0.05f,
                                 .bias_correction1 = 0.271f,
                                 .bias_correction2 = 0.142625f,
                                 .eps = 1e-8f,
                                 .weight_decay = 0.1f};
    std::vector<OptimizerRow> variants(5, update);
    variants[1].action = TensorAction::kSkip;
    variants[2].action = TensorAction::kFrozen;
    variants[3].clip = 0.3f;
    variants[4].update_clip = 0.7f;
    for (const OptimizerRow& variant : variants) {
      for (const int64_t n : {1, 15, 16, 17, 1000}) {
        for (const bool special : {false, true}) {
          FloatArrays expected;  // g, p, m, v
          for (uint64_t s = 0; s < 4; ++s) expected.push_back(SampleValues(3, s, n, special));
          FloatArrays got = expected;
          for (auto [arrays, set] : {std::pair(&expected, Isa::kScalar), std::pair(&got, isa)}) {
            options_.kernels.adamw(set, variant, variant.clip, (*arrays)[0].data(),
                                   (*arrays)[1].data(), (*arrays)[2].data(), (*arrays)[3].data(),
                                   n);
          }
          CompareArrays(expected, got, fmt::format("{} elements", n), &row);
        }
      }
    }
    Finish(std::move(row));
  }

  void CheckSumSquares(Isa isa) {
    SelftestRow row = Row(section_, "sum of squares", "clause 11: FP64, lanes by clause 6");
    for (const int64_t n : {0, 1, 15, 16, 17, 1000, 65536}) {
      for (const bool special : {false, true}) {
        const std::vector<float> x = SampleValues(4, 0, n, special);
        const std::vector<double> expected = {
            options_.kernels.sum_squares(Isa::kScalar, x.data(), n)};
        const std::vector<double> got = {options_.kernels.sum_squares(isa, x.data(), n)};
        Compare(FirstDifferent(expected, got) < 0,
                fmt::format("{} elements: expected {:a}, got {:a}", n, expected[0], got[0]), &row);
      }
    }
    Finish(std::move(row));
  }

  void CheckOpSamples(Isa isa, const OpSampleShape& shape,
                      std::map<std::string, SelftestRow>* rows) {
    for (const OpSample& sample : OpSamples(shape)) {
      SelftestRow& row = (*rows)[sample.op];
      row.section = section_;
      row.what = "op " + sample.op;
      row.why = "op table: one order for every width";
      CompareArrays(sample.Outputs(options_.kernels.ops(Isa::kScalar)),
                    sample.Outputs(options_.kernels.ops(isa)),
                    fmt::format("n {}, window {}, seed {}", shape.n, shape.window, shape.seed),
                    &row);
    }
  }

  static void CompareArrays(const FloatArrays& expected, const FloatArrays& got,
                            const std::string& place, SelftestRow* row) {
    for (size_t i = 0; i < expected.size(); ++i) {
      const int64_t at = FirstBitDifference(expected[i], got[i]);
      Compare(at < 0,
              at < 0 ? ""
                     : fmt::format("{}, array {}, element {}: expected {:a}, got {:a}", place, i,
                                   at, expected[i][at], got[i][at]),
              row);
    }
  }

  // Digests of RUN@0 .. RUN@kUpdates and the records of the updates.
  Result<std::vector<std::string>> Chain(const Carried& carried) const {
    RT_ASSIGN_OR_RETURN(const Recipe recipe, SelftestRecipe(carried.overrides));
    const auto batches =
        std::make_shared<RandomBatches>(recipe.model.vocab_size, recipe.data.sequence_length, 5);
    std::vector<std::string> chain;
    const JobOptions& options = carried.job;
    RT_RETURN_IF_ERROR(RunLocalRanks(options.tp * options.dp, {}, [&](Comm& comm) -> Status {
      RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job,
                          Job::Make(recipe, comm, options, batches));
      if (options_.probe) job->set_probe(options_.probe(options));
      RT_RETURN_IF_ERROR(job->StartFresh());
      RT_ASSIGN_OR_RETURN(const Digest first, job->StateDigestNow());
      chain.push_back(first.Hex());
      for (int i = 0; i < kUpdates; ++i) {
        RT_ASSIGN_OR_RETURN(const Job::Step step, job->Advance());
        chain.push_back(step.digest.Hex() + " " + RecordJson(step.result.record));
      }
      return {};
    }));
    return chain;
  }

  void CompareChain(const Carried& carried, const std::vector<std::string>& expected,
                    SelftestRow* row) {
    const Result<std::vector<std::string>> got = Chain(carried);
    if (!got.ok()) {
      return Compare(false, Describe(carried.job) + ": " + got.status().message(), row);
    }
    const auto [e, g] = std::mismatch(expected.begin(), expected.end(), got->begin(), got->end());
    const auto digest = [](const std::string& text) { return text.substr(0, 32); };
    Compare(e == expected.end(),
            e == expected.end()
                ? ""
                : fmt::format("{}: position {}: expected state {}, got {}", Describe(carried.job),
                              e - expected.begin(), digest(*e), digest(*g)),
            row);
  }

  void CheckUpdates(const std::string& section, const std::vector<std::string>& overrides,
                    bool golden) {
    const Carried reference{{.tp = 1, .dp = 1, .threads = 1, .isa = Isa::kScalar}, overrides};
    SelftestRow first =
        Row(section, "scalar, 1 thread, 1 rank",
            golden ? "the promise: as other machines gave it" : "the promise: the same twice");
    const Result<std::vector<std::string>> chain = Chain(reference);
    if (!chain.ok()) {
      Compare(false, chain.status().message(), &first);
      return Finish(std::move(first));
    }
    if (golden) {
      std::string all;
      for (const std::string& link : *chain) all += link.substr(0, 32);
      const std::string got = DigestOf(all).Hex();
      Compare(got == kGoldenUpdates,
              fmt::format("expected the digest {}, got {}", kGoldenUpdates, got), &first);
    }
    CompareChain(reference, *chain, &first);
    Finish(std::move(first));
    for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
      if (!IsaSupported(isa)) continue;
      for (const int tp : {1, 2, 4}) CheckCarriers(section, isa, tp, overrides, *chain);
    }
    if (!options_.full) return;
    SelftestRow row =
        Row(section, "dp 2, activations recomputed", "clauses 7, 8: lanes and places are fixed");
    std::vector<std::string> recomputed = overrides;
    recomputed.push_back("execution.recompute_activations=true");
    CompareChain({{.tp = 2, .dp = 2, .threads = 1, .isa = BestIsa()}, overrides}, *chain, &row);
    CompareChain({{.tp = 1, .dp = 1, .threads = 2, .isa = BestIsa()}, recomputed}, *chain, &row);
    Finish(std::move(row));
  }

  void CheckCarriers(const std::string& section, Isa isa, int tp,
                     const std::vector<std::string>& overrides,
                     const std::vector<std::string>& chain) {
    SelftestRow row = Row(section, fmt::format("{}, {} ranks, 1, 2, 3 threads", IsaName(isa), tp),
                          "clauses 5 to 10: who computes is not what is added");
    for (const int threads : {1, 2, 3}) {
      for (int again = 0; again < 2; ++again) {
        CompareChain({{.tp = tp, .dp = 1, .threads = threads, .isa = isa}, overrides}, chain, &row);
      }
    }
    Finish(std::move(row));
  }

  const SelftestOptions& options_;
  std::string section_;
  std::vector<SelftestRow> rows_;
};

}  // namespace

const char* OutcomeName(SelftestOutcome outcome) {
  static constexpr const char* kNames[] = {"identical", "differs", "absent"};
  return kNames[static_cast<int>(outcome)];
}

Result<Recipe> SelftestRecipe(const std::vector<std::string>& overrides) {
  return ParseRecipe(kRecipeText, "the built-in recipe", overrides);
}

std::vector<SelftestRow> RunSelftest(const SelftestOptions& options) {
  Selftest selftest(options);
  selftest.CheckMachine();
  for (const Isa isa : kVectorIsas) selftest.CheckIsa(isa);
  return selftest.CheckThreads().CheckAllUpdates().CheckNative().TakeRows();
}

std::vector<SelftestRow> SelftestIsa(Isa isa, const SelftestOptions& options) {
  return Selftest(options).CheckIsa(isa).TakeRows();
}

std::vector<SelftestRow> SelftestOps(Isa isa, const SelftestOptions& options) {
  return Selftest(options).CheckOps(isa).TakeRows();
}

std::vector<SelftestRow> SelftestUpdates(const SelftestOptions& options) {
  return Selftest(options).CheckAllUpdates().TakeRows();
}

std::vector<SelftestRow> SelftestNative(const SelftestOptions& options) {
  return Selftest(options).CheckNative().TakeRows();
}

}  // namespace retrace
