// The ops of the op table that add along rows, or look along them: sixteen threads to a row, thread
// l of them being clause 6's lane l.
#include "kernels/cuda/device_ops.h"
#include "kernels/cuda/device_softmax.h"

namespace retrace::cuda {
namespace {

#define RT_FOR_ROWS(i, first, last) \
  for (int64_t i = (first) + RowOfThread(); i < (last); i += RowsOfGrid())

template <class Args>
void OverRows(const char* name, void (*kernel)(Args, int64_t, int64_t), const Args& args,
              int64_t first, int64_t last) {
  if (last <= first) return;
  const unsigned threads = launch_shape().threads;
  Launch(name, kernel, GridFor(last - first, threads / kRowThreads), threads, args, first, last);
}

template <class T>
__global__ void RmsNormKernel(RmsNormArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ROWS(i, first, last) {
    const T* x = a.x_RN + i * a.n;
    T lane = 0;
    RT_FOR_LANE(j, 0, a.n) lane = math::Fma(x[j], x[j], lane);
    const T r = element::InverseRms(SumOfRow(lane), a.n, a.eps);
    if (LaneOfThread() == 0) a.r_R[i] = r;
    RT_FOR_LANE(j, 0, a.n) a.y_RN[i * a.n + j] = element::Normed(x[j], r, a.w_N, j, a.round);
  }
}

// A thread reads and writes its own elements only, so dx may be dy.
template <class T>
__global__ void RmsNormBackwardKernel(RmsNormBackwardArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ROWS(i, first, last) {
    const T* x = a.x_RN + i * a.n;
    const T* dy = a.dy_RN + i * a.n;
    const T r = a.r_R[i];
    T lane = 0;
    RT_FOR_LANE(j, 0, a.n) {
      lane = math::Fma(element::Weighted(dy[j], a.w_N, j), x[j] * r, lane);
    }
    const T c = SumOfRow(lane) / static_cast<T>(a.n);
    RT_FOR_LANE(j, 0, a.n) {
      a.dx_RN[i * a.n + j] =
          element::NormGradient(element::Weighted(dy[j], a.w_N, j), x[j], r, c, a.round);
    }
  }
}

template <class T>
__global__ void SoftmaxKernel(SoftmaxArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ROWS(i, first, last) {
    T* s = a.s_RS + i * a.length;
    const VisibleKeys keys = Visible(i % a.length, a.window);
    const T m = ScaleScores(s, keys, a.scale, a.round_scores);
    T lane = 0;
    RT_FOR_LANE(k, keys.first, keys.last) {
      s[k] = math::ExpCut(s[k] - m);
      lane = lane + s[k];
    }
    const T inverse = T(1) / SumOfRow(lane);
    RT_FOR_LANE(k, 0, a.length) {
      s[k] = k >= keys.first && k < keys.last ? s[k] * inverse : T(0);
      if (a.p_rounded_RS) a.p_rounded_RS[i * a.length + k] = element::Rounded(s[k], a.round);
    }
  }
}

template <class T>
__global__ void SoftmaxBackwardKernel(SoftmaxBackwardArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ROWS(i, first, last) {
    const T* p = a.p_RS + i * a.length;
    T* ds = a.dp_RS + i * a.length;
    const VisibleKeys keys = Visible(i % a.length, a.window);
    T lane = 0;
    RT_FOR_LANE(k, keys.first, keys.last) lane = math::Fma(p[k], ds[k], lane);
    const T c = SumOfRow(lane);
    RT_FOR_LANE(k, 0, a.length) {
      const bool seen = k >= keys.first && k < keys.last;
      ds[k] = seen ? element::ScoreGradient(p[k], ds[k], c, a.scale, a.round) : T(0);
    }
  }
}

template <class T>
__global__ void OnlineSoftmaxKernel(OnlineSoftmaxArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ROWS(i, first, last) OnlineSoftmaxRow(a, i);
}

template <class T>
__global__ void BlockBackwardKernel(BlockBackwardArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ROWS(i, first, last) BlockBackwardRow(a, i);
}

template <class T>
__global__ void RowDotKernel(RowDotArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ROWS(i, first, last) {
    T lane = 0;
    RT_FOR_LANE(j, 0, a.n) {
      lane = math::Fma(a.x[i * a.x_stride + j], a.y[i * a.y_stride + j], lane);
    }
    const T sum = SumOfRow(lane);
    if (LaneOfThread() == 0) a.c[i] = sum;
  }
}

template <class T>
__global__ void RowMaxKernel(RowMaxArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ROWS(t, first, last) {
    T m = MinusInfinity<T>();
    RT_FOR_LANE(v, 0, a.n) m = math::Max(m, a.z_TV[t * a.n + v]);
    m = MaxOfRow(m);
    if (LaneOfThread() == 0) a.m_T[t] = m;
  }
}

template <class T>
__global__ void SumExpKernel(SumExpArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ROWS(t, first, last) {
    const T* z = a.z_TV + t * a.n;
    const T m = a.m_T[t];
    T lane = 0;
    RT_FOR_LANE(v, 0, a.n) lane = lane + math::ExpCut(z[v] - m);
    const T sum = SumOfRow(lane);
    if (LaneOfThread() != 0) continue;
    const int64_t label = a.labels_T[t] - a.row_first;
    a.sum_T[t] = sum;
    a.label_T[t] = label >= 0 && label < a.n ? z[label] : T(0);
  }
}

template <class T>
__global__ void CrossEntropyBackwardKernel(CrossEntropyBackwardArgs<T> a, int64_t first,
                                           int64_t last) {
  RT_FOR_ROWS(t, first, last) {
    T* z = a.z_TV + t * a.n;
    const T m = a.m_T[t], inverse = T(1) / a.sum_T[t];
    const T factor = a.factor_T ? a.factor_T[t] : T(1);
    const int64_t label = a.labels_T[t] - a.row_first;
    RT_FOR_LANE(v, 0, a.n) {
      z[v] = element::LogitGradient(z[v], m, inverse, factor, v == label, a.inv_n, a.round);
    }
  }
}

#define RT_ROW_OP(NAME)                                            \
  template <class T>                                               \
  void NAME(const NAME##Args<T>& a, int64_t first, int64_t last) { \
    OverRows(#NAME, NAME##Kernel<T>, a, first, last);              \
  }

RT_ROW_OP(RmsNorm)
RT_ROW_OP(RmsNormBackward)
RT_ROW_OP(Softmax)
RT_ROW_OP(SoftmaxBackward)
RT_ROW_OP(OnlineSoftmax)
RT_ROW_OP(BlockBackward)
RT_ROW_OP(RowDot)
RT_ROW_OP(RowMax)
RT_ROW_OP(SumExp)
RT_ROW_OP(CrossEntropyBackward)

}  // namespace

template <class T>
void AddRowOps(OpTable<T>* table) {
  table->rms_norm = RmsNorm<T>;
  table->rms_norm_backward = RmsNormBackward<T>;
  table->softmax = Softmax<T>;
  table->softmax_backward = SoftmaxBackward<T>;
  table->online_softmax = OnlineSoftmax<T>;
  table->block_backward = BlockBackward<T>;
  table->row_dot = RowDot<T>;
  table->row_max = RowMax<T>;
  table->sum_exp = SumExp<T>;
  table->cross_entropy_backward = CrossEntropyBackward<T>;
}

template void AddRowOps(OpTable<float>*);
template void AddRowOps(OpTable<double>*);

}  // namespace retrace::cuda
