// RoundingBound: how far the output of one op may differ between two traces of the same update by
// rounding alone. Used by the diff of traces of different precision or framework. Not thread-safe.
//
// Local: given the op's inputs as both traces have them, so that a fault upstream does not excuse one
// here, and one here is not blamed on what follows. With dx the difference of an input x, and u the
// unit round-off, the Frobenius norm of the output's difference is bounded, op by op, by
//   (operator norm at the operands' magnitudes) * ||dx||, over all inputs, + lambda * sqrt(n) * u *
//   (product of the operands' norms),
// n the length of the sum: the probabilistic bound of Higham and Mary (SIAM J. Sci. Comput. 41, 2019)
// with lambda = 4, and Cauchy-Schwarz. Weights enter by Frobenius norm and largest magnitude, which a
// trace has of its state. Loose by the ratio of Frobenius and spectral norms, and for attention by
// that of the largest rows to the typical; never too tight but for luck.
#ifndef RETRACE_REPLAY_ROUNDING_BOUND_H_
#define RETRACE_REPLAY_ROUNDING_BOUND_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "replay/whole_trace.h"

namespace retrace {

// The larger unit round-off of what two traces compute in: of each one's precision policy, where
// retrace made it, and of its ops' types.
double UnitRoundoff(const WholeTrace& a, const WholeTrace& b);

class RoundingBound {
 public:
  // Both outlive it. Sizes, scales and the window are those of `a`'s recipe.
  RoundingBound(const WholeTrace& a, const WholeTrace& b);

  // Of the Frobenius norm of the op's difference. nullopt: it is not known, for an input or the norms of
  // a weight are in neither trace, or for there is no rule (the optimizer's ops).
  Result<std::optional<double>> Of(const std::string& op);

 private:
  // An op's elements in both traces.
  struct Both {
    std::vector<double> a, b;
    int64_t rows = 0, cols = 0;
    bool empty() const { return a.empty(); }
    double Magnitude(int64_t i) const;
    double Difference(int64_t i) const;
    double Norm() const;  // the larger one
    double Distance() const;
    double MaxRow(int64_t width) const;          // largest norm of `width` elements in a row
    double MaxRowDistance(int64_t width) const;
  };
  struct Weight {
    double frobenius = 0, max = 0;
  };
  // Of one layer, or (l = -1) outside.
  struct Place {
    std::string batch;  // "mb0"
    int64_t layer = -1;
    std::string op;
  };

  const Both& In(const std::string& name);  // empty, and missing_: not there
  const Both& InLayer(const Place& at, const std::string& op) { return In(LayerName(at, op)); }
  std::string LayerName(const Place& at, const std::string& op) const;
  std::string LayerInput(const Place& at) const;
  Weight Norms(const std::string& tensor);
  Weight LayerNorms(int64_t layer, const char* suffix);

  double Gamma(int64_t n) const;
  double Identity(const Both& x) const;
  double Linear(const Both& x, double weight, int64_t n) const;
  double RmsNorm(const Both& x, double weight_max, int64_t width) const;
  double RmsNormBackward(const Both& x, const Both& dy, double weight_max, int64_t width) const;
  double ScoreShift(const Place& at);
  double RopeRounding(const Both& x) const;

  double Forward(const Place& at);
  double ForwardAttention(const Place& at);
  double ForwardMlp(const Place& at);
  double ForwardHead(const Place& at);
  double Backward(const Place& at);
  double BackwardAttention(const Place& at);
  double BackwardQkv(const Place& at);
  double BackwardMlp(const Place& at);
  double BackwardHead(const Place& at);
  double ResidualBackward(const Place& at, int64_t layer);
  double Parameter(const std::string& batch, const std::string& tensor);
  double ProjectionGradient(const Place& at, const std::string& kind);
  double NormGradient(const Both& x, const Both& dy, int64_t width) const;

  const WholeTrace& a_;
  const WholeTrace& b_;
  const Recipe& recipe_;
  const ModelRecipe& model_;
  const double u_;
  bool missing_ = false;
  Status status_;
  std::map<std::string, Both> held_;  // inputs of the op in hand
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_ROUNDING_BOUND_H_
