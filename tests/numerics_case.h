// What the tests of single clauses share: the tiny recipe, a lone transformer with a batch of it, a
// probe that keeps every tensor, and whole matrices out of slabs.
#ifndef RETRACE_TESTS_NUMERICS_CASE_H_
#define RETRACE_TESTS_NUMERICS_CASE_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "replay/initial_state.h"
#include "replay/job.h"
#include "replay/probe.h"
#include "tests/longhand.h"
#include "tests/memory_batches.h"
#include "tests/parity_case.h"
#include "tests/places.h"

namespace retrace {

inline std::vector<Isa> SupportedIsas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (IsaSupported(isa)) isas.push_back(isa);
  }
  return isas;
}

// examples/tiny.toml: V = 8, both kinds of layers, KV heads that shards share.
inline Recipe TinyRecipe(std::vector<std::string> overrides = {}) {
  overrides.push_back("data.path=" + TestData("dataset/tiny"));
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", overrides).value();
}

template <class T>
class KeepingProbe : public Probe {
 public:
  void Op(const std::string& name, const float* data, int64_t rows, int64_t cols) override {
    if constexpr (std::is_same_v<T, float>) Keep(name, data, rows * cols);
  }
  void Op(const std::string& name, const double* data, int64_t rows, int64_t cols) override {
    if constexpr (std::is_same_v<T, double>) Keep(name, data, rows * cols);
  }
  // Of the last op of that name.
  const std::vector<T>& operator[](const std::string& name) const {
    const auto at = kept_.find(name);
    EXPECT_NE(kept_.end(), at) << "no op " << name;
    static const std::vector<T> none;
    return at == kept_.end() ? none : at->second;
  }
  const std::map<std::string, std::vector<T>>& all() const { return kept_; }

 private:
  void Keep(const std::string& name, const T* data, int64_t n) {
    kept_[name].assign(data, data + n);
  }
  std::map<std::string, std::vector<T>> kept_;
};

// Forward and backward of one batch of a recipe at its initial values, every op's output kept.
template <class T>
struct KeptPass {
  LoneTransformer<T> run;
  TokenBatch batch;
  T inv_n;
  KeepingProbe<T> probe;
  double loss_sum = 0;

  explicit KeptPass(const Recipe& recipe, uint32_t seed = 7)
      : run(recipe, static_cast<int>(recipe.topology.virtual_shards), BestIsa(), 1) {
    const DataRecipe& data = recipe.data;
    const MemoryBatches source = MemoryBatches::Random(data.micro_batch_size, data.sequence_length,
                                                       recipe.model.vocab_size, seed);
    batch = ReadBatch(source, false, 0, data.micro_batch_size, data.sequence_length).value();
    inv_n = static_cast<T>(1.0 / static_cast<double>(batch.tokens()));
    for (int s = 0; s < run.layout.shards(); ++s) {
      for (const Piece& piece : run.layout.pieces(s)) {
        std::vector<float> values(piece.numel());
        InitialPiece(recipe, run.layout.tensors()[piece.tensor], piece, values.data());
        for (size_t i = 0; i < values.size(); ++i) {
          // Norm weights that are not 1, as after some training.
          float w = run.layout.tensors()[piece.tensor].vector
                        ? 1.0f + 0.01f * static_cast<float>(i % 7)
                        : values[i];
          if (recipe.precision.Forward(Point::kWeights) == Format::kBf16) w = longhand::Bf16(w);
          run.weights[s][piece.offset + i] = w;
        }
      }
    }
    run.transformer.set_probe(&probe);
    loss_sum = run.transformer.Forward(batch, run.weight_slabs(), "mb0").value();
    EXPECT_TRUE(
        run.transformer.Backward(batch, run.weight_slabs(), inv_n, run.gradient_slabs()).ok());
  }

  // What shard `s` computes with for a tensor: the owner's piece.
  const T* Weight(int s, const std::string& name) const {
    const ParameterMap::Place place = run.map.Find(s, run.layout.Find(name));
    return run.weights[place.slab].data() + place.offset;
  }
  std::vector<T> Gradient(int s, const std::string& name) const {
    const ParameterMap::Place place = run.map.Find(s, run.layout.Find(name));
    const T* first = run.gradients[place.slab].data() + place.offset;
    return std::vector<T>(first, first + place.rows * place.cols);
  }
  const std::vector<T>& Op(const std::string& name) const { return probe["mb0/" + name]; }
  const std::vector<T>& Op(const std::string& name, int shard) const {
    return Op(name + "/shard" + std::to_string(shard));
  }
};

namespace longhand {

// out[i, j] = clause-5 product of a(i, k) and b(k, j).
template <class T, class A, class B>
std::vector<T> Product(int64_t m, int64_t n, int64_t k, A a, B b) {
  std::vector<T> out(m * n), x(k), y(k);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t l = 0; l < k; ++l) {
        x[l] = a(i, l);
        y[l] = b(l, j);
      }
      out[i * n + j] = Chain(x, y);
    }
  }
  return out;
}

template <class T>
std::vector<T> Add(std::vector<T> a, const std::vector<T>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] = a[i] + b[i];
  return a;
}

template <class T>
std::vector<T> RoundAll(std::vector<T> a, Rounding rounding) {
  for (T& x : a) x = Round(x, rounding);
  return a;
}

// Clause 7: sum(lo..hi) = sum(lo..mid) + sum(mid..hi).
template <class T>
std::vector<T> ShardSum(const std::vector<std::vector<T>>& parts, size_t lo, size_t hi) {
  if (hi - lo == 1) return parts[lo];
  const size_t mid = lo + (hi - lo) / 2;
  return Add(ShardSum(parts, lo, mid), ShardSum(parts, mid, hi));
}

// The tree over partials, each rounded before, the sum after.
template <class T>
std::vector<T> ShardSum(std::vector<std::vector<T>> parts, Rounding partial, Rounding round) {
  for (auto& part : parts) part = RoundAll(part, partial);
  return RoundAll(ShardSum(parts, 0, parts.size()), round);
}

}  // namespace longhand
}  // namespace retrace

#endif  // RETRACE_TESTS_NUMERICS_CASE_H_
