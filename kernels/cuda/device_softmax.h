// DeviceSoftmax: what the sixteen threads of a row do to a row of scores. Used by the row kernels and
// by blockwise attention, so that both give the bits of one text. Clauses 6 and 9.
#ifndef RETRACE_KERNELS_CUDA_DEVICE_SOFTMAX_H_
#define RETRACE_KERNELS_CUDA_DEVICE_SOFTMAX_H_

#include "kernels/cuda/device_rows.h"

namespace retrace::cuda {

// The scores of the keys that a row sees, scaled in place; their maximum.
template <class T>
RT_DEVICE T ScaleScores(T* s, VisibleKeys keys, T scale, Rounding round) {
  T m = MinusInfinity<T>();
  RT_FOR_LANE(k, keys.first, keys.last) {
    s[k] = element::Score(s[k], scale, round);
    m = math::Max(m, s[k]);
  }
  return MaxOfRow(m);
}

// Row i of OnlineSoftmaxArgs (kernels/ops.h).
template <class T>
RT_DEVICE void OnlineSoftmaxRow(const OnlineSoftmaxArgs<T>& a, int64_t i) {
  T* s = a.s + i * a.stride;
  const VisibleKeys seen = VisibleInBlock(a.query_first + i, a.window, a.key_first, a.keys);
  if (seen.first == seen.last) {
    RT_FOR_LANE(k, 0, a.keys) s[k] = 0;
    if (LaneOfThread() == 0) a.touched[i] = 0, a.a[i] = 1;
    return;
  }
  const bool opens = Visible(a.query_first + i, a.window).first >= a.key_first;
  const T before = opens ? MinusInfinity<T>() : a.m[i];
  T m = ScaleScores(s, seen, a.scale, a.round_scores);
  if (!opens) m = math::Max(before, m);
  T lane = 0;
  RT_FOR_LANE(k, 0, a.keys) {
    const T p = k >= seen.first && k < seen.last ? math::ExpCut(s[k] - m) : T(0);
    lane = lane + p;
    s[k] = element::Rounded(p, a.round);
  }
  const T sum = SumOfRow(lane);
  if (LaneOfThread() != 0) return;
  const T factor = opens ? T(1) : math::ExpCut(before - m);
  a.a[i] = factor;
  a.l[i] = opens ? sum : a.l[i] * factor + sum;
  a.m[i] = m;
  a.touched[i] = opens ? 1 : 2;
}

// Row i of BlockBackwardArgs.
template <class T>
RT_DEVICE void BlockBackwardRow(const BlockBackwardArgs<T>& a, int64_t i) {
  T* s = a.s + i * a.stride;
  T* dp = a.dp + i * a.stride;
  const VisibleKeys seen = VisibleInBlock(a.query_first + i, a.window, a.key_first, a.keys);
  const T inverse = T(1) / a.l[i];
  RT_FOR_LANE(k, 0, a.keys) {
    const bool here = k >= seen.first && k < seen.last;
    const T score = here ? element::Score(s[k], a.scale, a.round_scores) : T(0);
    const T p = here ? math::ExpCut(score - a.m[i]) * inverse : T(0);
    dp[k] = here ? element::ScoreGradient(p, dp[k], a.c[i], a.scale, a.round) : T(0);
    s[k] = here ? element::Rounded(p, a.round_p) : T(0);
  }
}

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_DEVICE_SOFTMAX_H_
