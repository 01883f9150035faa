// The op table in code: plain loops in FP32 and FP64. The vector files must give these bits.
#include <cstring>

#include "core/scalar_math.h"
#include "kernels/element_math.h"
#include "kernels/ops.h"
#include "kernels/ops_isa.h"

namespace retrace {
namespace {

using element::kChain;
using element::kLanes;
using element::Rounded;
using element::Score;
using element::SumOfLanes;

template <class T>
T DotByLanes(const T* x, const T* y, int64_t n) {
  T lane[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lane[i % kLanes] = math::Fma(x[i], y[i], lane[i % kLanes]);
  return SumOfLanes(lane);
}

template <class T>
void Embed(const EmbedArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    T* x = a.x_TN + t * a.n;
    const int64_t row = a.ids_T[t] - a.row_first;
    if (row < 0 || row >= a.rows) {
      std::memset(x, 0, a.n * sizeof(T));
      continue;
    }
    const T* e = a.table_VN + row * a.n;
    for (int64_t j = 0; j < a.n; ++j) x[j] = Rounded(e[j] * a.scale, a.round);
  }
}

template <class T>
void EmbedBackward(const EmbedBackwardArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t t = 0; t < a.tokens; ++t) {
    const int64_t row = a.ids_T[t] - a.row_first;
    if (row < 0 || row >= a.rows || a.ids_T[t] == a.dropped) continue;
    T* g = a.dtable_VN + row * a.n;
    const T* dx = a.dx_TN + t * a.n;
    for (int64_t j = first; j < last; ++j) g[j] = g[j] + Rounded(dx[j] * a.scale, a.round);
  }
}

template <class T>
void RmsNorm(const RmsNormArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const T* x = a.x_RN + i * a.n;
    T* y = a.y_RN + i * a.n;
    const T r = element::InverseRms(DotByLanes(x, x, a.n), a.n, a.eps);
    a.r_R[i] = r;
    for (int64_t j = 0; j < a.n; ++j) y[j] = element::Normed(x[j], r, a.w_N, j, a.round);
  }
}

template <class T>
void RmsNormBackward(const RmsNormBackwardArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const T* x = a.x_RN + i * a.n;
    const T* dy = a.dy_RN + i * a.n;
    T* dx = a.dx_RN + i * a.n;
    const T r = a.r_R[i];
    T lane[kLanes] = {};
    for (int64_t j = 0; j < a.n; ++j) {
      const T g = element::Weighted(dy[j], a.w_N, j);
      lane[j % kLanes] = math::Fma(g, x[j] * r, lane[j % kLanes]);
    }
    const T c = SumOfLanes(lane) / static_cast<T>(a.n);
    for (int64_t j = 0; j < a.n; ++j) {
      dx[j] = element::NormGradient(element::Weighted(dy[j], a.w_N, j), x[j], r, c, a.round);
    }
  }
}

template <class T>
void RmsNormWeight(const RmsNormWeightArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t j = first; j < last; ++j) {
    T sum = 0;
    for (int64_t block = 0; block < a.rows; block += kChain) {
      T chain = 0;
      for (int64_t i = block; i < a.rows && i < block + kChain; ++i) {
        chain = math::Fma(a.dy_RN[i * a.n + j], a.x_RN[i * a.n + j] * a.r_R[i], chain);
      }
      sum = block == 0 ? chain : sum + chain;
    }
    a.dw_N[j] = sum;
  }
}

template <class T>
void Rope(const RopeArgs<T>& a, int64_t first, int64_t last) {
  const int64_t half = a.dim / 2;
  for (int64_t t = first; t < last; ++t) {
    const T* cos = a.cos_SD + (t % a.length) * half;
    const T* sin = a.sin_SD + (t % a.length) * half;
    for (int64_t h = 0; h < a.heads; ++h) {
      const T* x = a.x_TC + (t * a.heads + h) * a.dim;
      T* y = a.y_TC + (t * a.heads + h) * a.dim;
      for (int64_t i = 0; i < half; ++i) {
        const T s = a.backward ? -sin[i] : sin[i];
        const T x1 = x[i], x2 = x[i + half];
        y[i] = element::RotatedFirst(x1, x2, cos[i], s, a.round);
        y[i + half] = element::RotatedSecond(x1, x2, cos[i], s, a.round);
      }
    }
  }
}

template <class T>
void Softmax(const SoftmaxArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    T* s = a.s_RS + i * a.length;
    const VisibleKeys keys = Visible(i % a.length, a.window);
    for (int64_t k = keys.first; k < keys.last; ++k) s[k] = Score(s[k], a.scale, a.round_scores);
    T m = s[keys.first];
    for (int64_t k = keys.first + 1; k < keys.last; ++k) m = math::Max(m, s[k]);
    T lane[kLanes] = {};
    for (int64_t k = keys.first; k < keys.last; ++k) {
      s[k] = math::ExpCut(s[k] - m);
      lane[k % kLanes] = lane[k % kLanes] + s[k];
    }
    const T inverse = T(1) / SumOfLanes(lane);
    for (int64_t k = 0; k < a.length; ++k) {
      s[k] = k >= keys.first && k < keys.last ? s[k] * inverse : T(0);
      if (a.p_rounded_RS) a.p_rounded_RS[i * a.length + k] = Rounded(s[k], a.round);
    }
  }
}

template <class T>
void SoftmaxBackward(const SoftmaxBackwardArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const T* p = a.p_RS + i * a.length;
    T* ds = a.dp_RS + i * a.length;
    const VisibleKeys keys = Visible(i % a.length, a.window);
    T lane[kLanes] = {};
    for (int64_t k = keys.first; k < keys.last; ++k) {
      lane[k % kLanes] = math::Fma(p[k], ds[k], lane[k % kLanes]);
    }
    const T c = SumOfLanes(lane);
    for (int64_t k = 0; k < a.length; ++k) {
      const bool seen = k >= keys.first && k < keys.last;
      ds[k] = seen ? element::ScoreGradient(p[k], ds[k], c, a.scale, a.round) : T(0);
    }
  }
}

template <class T>
void OnlineSoftmax(const OnlineSoftmaxArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    T* s = a.s + i * a.stride;
    const VisibleKeys seen = VisibleInBlock(a.query_first + i, a.window, a.key_first, a.keys);
    if (seen.first == seen.last) {
      for (int64_t k = 0; k < a.keys; ++k) s[k] = 0;
      a.touched[i] = 0;
      a.a[i] = 1;
      continue;
    }
    // The row's first visible block is the one with the row's first visible key.
    const bool opens = Visible(a.query_first + i, a.window).first >= a.key_first;
    for (int64_t k = seen.first; k < seen.last; ++k) s[k] = Score(s[k], a.scale, a.round_scores);
    T m = s[seen.first];
    for (int64_t k = seen.first + 1; k < seen.last; ++k) m = math::Max(m, s[k]);
    if (!opens) m = math::Max(a.m[i], m);
    T lane[kLanes] = {};
    for (int64_t k = 0; k < a.keys; ++k) {
      const T p = k >= seen.first && k < seen.last ? math::ExpCut(s[k] - m) : T(0);
      lane[k % kLanes] = lane[k % kLanes] + p;
      s[k] = Rounded(p, a.round);
    }
    const T sum = SumOfLanes(lane);
    a.a[i] = opens ? T(1) : math::ExpCut(a.m[i] - m);
    a.l[i] = opens ? sum : a.l[i] * a.a[i] + sum;
    a.m[i] = m;
    a.touched[i] = opens ? 1 : 2;
  }
}

template <class T>
void BlockBackward(const BlockBackwardArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    T* s = a.s + i * a.stride;
    T* dp = a.dp + i * a.stride;
    const VisibleKeys seen = VisibleInBlock(a.query_first + i, a.window, a.key_first, a.keys);
    const T inverse = T(1) / a.l[i];
    for (int64_t k = 0; k < a.keys; ++k) {
      if (k < seen.first || k >= seen.last) {
        s[k] = 0;
        dp[k] = 0;
        continue;
      }
      const T p = math::ExpCut(Score(s[k], a.scale, a.round_scores) - a.m[i]) * inverse;
      dp[k] = element::ScoreGradient(p, dp[k], a.c[i], a.scale, a.round);
      s[k] = Rounded(p, a.round_p);
    }
  }
}

template <class T>
void RowDot(const RowDotArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    a.c[i] = DotByLanes(a.x + i * a.x_stride, a.y + i * a.y_stride, a.n);
  }
}

template <class T>
void RescaleAdd(const RescaleAddArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    if (a.touched[i] == 0) continue;
    T* o = a.o + i * a.o_stride;
    const T* t = a.t + i * a.n;
    for (int64_t j = 0; j < a.n; ++j) o[j] = a.touched[i] == 1 ? t[j] : o[j] * a.a[i] + t[j];
  }
}

template <class T>
void RowDivide(const RowDivideArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    for (int64_t j = 0; j < a.n; ++j) {
      a.o[i * a.stride + j] = Rounded(a.o[i * a.stride + j] / a.l[i], a.round);
    }
  }
}

template <class T>
void Geglu(const GegluArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    a.act[i] = element::Geglu(a.gate[i], a.up[i], a.round_gelu, a.round_product);
  }
}

template <class T>
void GegluBackward(const GegluBackwardArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const element::GegluGradients<T> d = element::GegluBackward(
        a.gate[i], a.up[i], a.dact[i], a.round_gelu, a.round_dgelu, a.round);
    a.dup[i] = d.up;
    a.dgate[i] = d.gate;
  }
}

template <class T>
void AddScale(const AddScaleArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    a.y[i] = element::AddScaled(a.a[i], a.b[i], a.scale, a.round_sum, a.round_scale);
  }
}

template <class T>
void Scale(const ScaleArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) a.y[i] = Rounded(a.x[i] * a.scale, a.round);
}

template <class T>
void Softcap(const SoftcapArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const T th = element::SoftcapTanh(a.z[i], a.cap, a.round);
    if (a.tanh) a.tanh[i] = th;
    a.z[i] = Rounded(a.cap * th, a.round);
  }
}

template <class T>
void SoftcapBackward(const SoftcapBackwardArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    a.dz[i] = element::SoftcapGradient(a.dz[i], a.tanh[i], a.cap, a.round);
  }
}

template <class T>
void RowMax(const RowMaxArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    const T* z = a.z_TV + t * a.n;
    T m = z[0];
    for (int64_t v = 1; v < a.n; ++v) m = math::Max(m, z[v]);
    a.m_T[t] = m;
  }
}

template <class T>
void SumExp(const SumExpArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    const T* z = a.z_TV + t * a.n;
    T lane[kLanes] = {};
    for (int64_t v = 0; v < a.n; ++v) {
      lane[v % kLanes] = lane[v % kLanes] + math::ExpCut(z[v] - a.m_T[t]);
    }
    a.sum_T[t] = SumOfLanes(lane);
    const int64_t label = a.labels_T[t] - a.row_first;
    a.label_T[t] = label >= 0 && label < a.n ? z[label] : T(0);
  }
}

template <class T>
void CrossEntropyBackward(const CrossEntropyBackwardArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t t = first; t < last; ++t) {
    T* z = a.z_TV + t * a.n;
    const T inverse = T(1) / a.sum_T[t], factor = a.factor_T ? a.factor_T[t] : T(1);
    const int64_t label = a.labels_T[t] - a.row_first;
    for (int64_t v = 0; v < a.n; ++v) {
      z[v] = element::LogitGradient(z[v], a.m_T[t], inverse, factor, v == label, a.inv_n, a.round);
    }
  }
}

template <class T>
void Add(const AddArgs<T>& a, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) a.dst[i] = Rounded(a.dst[i] + a.src[i], a.round);
}

template <class T>
constexpr OpTable<T> kTable = {
    .embed = Embed<T>,
    .embed_backward = EmbedBackward<T>,
    .rms_norm = RmsNorm<T>,
    .rms_norm_backward = RmsNormBackward<T>,
    .rms_norm_weight = RmsNormWeight<T>,
    .rope = Rope<T>,
    .softmax = Softmax<T>,
    .softmax_backward = SoftmaxBackward<T>,
    .online_softmax = OnlineSoftmax<T>,
    .block_backward = BlockBackward<T>,
    .row_dot = RowDot<T>,
    .rescale_add = RescaleAdd<T>,
    .row_divide = RowDivide<T>,
    .geglu = Geglu<T>,
    .geglu_backward = GegluBackward<T>,
    .add_scale = AddScale<T>,
    .scale = Scale<T>,
    .softcap = Softcap<T>,
    .softcap_backward = SoftcapBackward<T>,
    .row_max = RowMax<T>,
    .sum_exp = SumExp<T>,
    .cross_entropy_backward = CrossEntropyBackward<T>,
    .add = Add<T>,
};

}  // namespace

const OpTable<float> kScalarOps = kTable<float>;
const OpTable<double> kScalarOps64 = kTable<double>;

}  // namespace retrace
