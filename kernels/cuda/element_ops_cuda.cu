// The ops of the op table that work element by element, one thread to each.
#include "kernels/cuda/device_ops.h"
#include "kernels/cuda/device_rows.h"

namespace retrace::cuda {
namespace {

#define RT_FOR_ELEMENTS(i, first, last) \
  for (int64_t i = (first) + ThreadOfGrid(); i < (last); i += ThreadsOfGrid())

// Launches a kernel (args, first, last) over that many elements.
template <class Args>
void OverElements(const char* name, void (*kernel)(Args, int64_t, int64_t), const Args& args,
                  int64_t first, int64_t last, int64_t count) {
  if (count <= 0) return;
  const unsigned threads = launch_shape().threads;
  Launch(name, kernel, GridFor(count, threads), threads, args, first, last);
}

template <class T>
__global__ void EmbedKernel(EmbedArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(i, first * a.n, last * a.n) {
    const int64_t row = a.ids_T[i / a.n] - a.row_first;
    const bool here = row >= 0 && row < a.rows;
    a.x_TN[i] = here ? element::Rounded(a.table_VN[row * a.n + i % a.n] * a.scale, a.round) : T(0);
  }
}

// A thread has a column, so tokens ascend.
template <class T>
__global__ void EmbedBackwardKernel(EmbedBackwardArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(j, first, last) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      const int64_t row = a.ids_T[t] - a.row_first;
      if (row < 0 || row >= a.rows || a.ids_T[t] == a.dropped) continue;
      T& g = a.dtable_VN[row * a.n + j];
      g = g + element::Rounded(a.dx_TN[t * a.n + j] * a.scale, a.round);
    }
  }
}

// Clause 5 down a column.
template <class T>
__global__ void RmsNormWeightKernel(RmsNormWeightArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(j, first, last) {
    T sum = 0;
    for (int64_t block = 0; block < a.rows; block += element::kChain) {
      T chain = 0;
      for (int64_t i = block; i < a.rows && i < block + element::kChain; ++i) {
        chain = math::Fma(a.dy_RN[i * a.n + j], a.x_RN[i * a.n + j] * a.r_R[i], chain);
      }
      sum = block == 0 ? chain : sum + chain;
    }
    a.dw_N[j] = sum;
  }
}

// A thread has both halves of a pair, so y may be x.
template <class T>
__global__ void RopeKernel(RopeArgs<T> a, int64_t first, int64_t last) {
  const int64_t half = a.dim / 2;
  RT_FOR_ELEMENTS(e, first * a.heads * half, last * a.heads * half) {
    const int64_t head = e / half, i = e % half;
    const int64_t at = (head / a.heads % a.length) * half + i;
    const T* x = a.x_TC + head * a.dim;
    T* y = a.y_TC + head * a.dim;
    const T cos = a.cos_SD[at], sin = a.backward ? -a.sin_SD[at] : a.sin_SD[at];
    const T x1 = x[i], x2 = x[i + half];
    y[i] = element::RotatedFirst(x1, x2, cos, sin, a.round);
    y[i + half] = element::RotatedSecond(x1, x2, cos, sin, a.round);
  }
}

template <class T>
__global__ void RescaleAddKernel(RescaleAddArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(e, first * a.n, last * a.n) {
    const int64_t i = e / a.n;
    if (a.touched[i] == 0) continue;
    T& o = a.o[i * a.o_stride + e % a.n];
    o = a.touched[i] == 1 ? a.t[e] : o * a.a[i] + a.t[e];
  }
}

template <class T>
__global__ void RowDivideKernel(RowDivideArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(e, first * a.n, last * a.n) {
    T& o = a.o[e / a.n * a.stride + e % a.n];
    o = element::Rounded(o / a.l[e / a.n], a.round);
  }
}

template <class T>
__global__ void GegluKernel(GegluArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(i, first, last) {
    a.act[i] = element::Geglu(a.gate[i], a.up[i], a.round_gelu, a.round_product);
  }
}

template <class T>
__global__ void GegluBackwardKernel(GegluBackwardArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(i, first, last) {
    const element::GegluGradients<T> d = element::GegluBackward(
        a.gate[i], a.up[i], a.dact[i], a.round_gelu, a.round_dgelu, a.round);
    a.dup[i] = d.up;
    a.dgate[i] = d.gate;
  }
}

template <class T>
__global__ void AddScaleKernel(AddScaleArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(i, first, last) {
    a.y[i] = element::AddScaled(a.a[i], a.b[i], a.scale, a.round_sum, a.round_scale);
  }
}

template <class T>
__global__ void ScaleKernel(ScaleArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(i, first, last) a.y[i] = element::Rounded(a.x[i] * a.scale, a.round);
}

template <class T>
__global__ void SoftcapKernel(SoftcapArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(i, first, last) {
    const T th = element::SoftcapTanh(a.z[i], a.cap, a.round);
    if (a.tanh) a.tanh[i] = th;
    a.z[i] = element::Rounded(a.cap * th, a.round);
  }
}

template <class T>
__global__ void SoftcapBackwardKernel(SoftcapBackwardArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(i, first, last) {
    a.dz[i] = element::SoftcapGradient(a.dz[i], a.tanh[i], a.cap, a.round);
  }
}

template <class T>
__global__ void AddKernel(AddArgs<T> a, int64_t first, int64_t last) {
  RT_FOR_ELEMENTS(i, first, last) a.dst[i] = element::Rounded(a.dst[i] + a.src[i], a.round);
}

// An entry of the op table: `count` elements of a range.
#define RT_ELEMENT_OP(NAME, COUNT)                                      \
  template <class T>                                                    \
  void NAME(const NAME##Args<T>& a, int64_t first, int64_t last) {      \
    OverElements(#NAME, NAME##Kernel<T>, a, first, last, (COUNT));      \
  }

RT_ELEMENT_OP(Embed, (last - first) * a.n)
RT_ELEMENT_OP(EmbedBackward, last - first)
RT_ELEMENT_OP(RmsNormWeight, last - first)
RT_ELEMENT_OP(Rope, (last - first) * a.heads * (a.dim / 2))
RT_ELEMENT_OP(RescaleAdd, (last - first) * a.n)
RT_ELEMENT_OP(RowDivide, (last - first) * a.n)
RT_ELEMENT_OP(Geglu, last - first)
RT_ELEMENT_OP(GegluBackward, last - first)
RT_ELEMENT_OP(AddScale, last - first)
RT_ELEMENT_OP(Scale, last - first)
RT_ELEMENT_OP(Softcap, last - first)
RT_ELEMENT_OP(SoftcapBackward, last - first)
RT_ELEMENT_OP(Add, last - first)

}  // namespace

template <class T>
void AddElementOps(OpTable<T>* table) {
  table->embed = Embed<T>;
  table->embed_backward = EmbedBackward<T>;
  table->rms_norm_weight = RmsNormWeight<T>;
  table->rope = Rope<T>;
  table->rescale_add = RescaleAdd<T>;
  table->row_divide = RowDivide<T>;
  table->geglu = Geglu<T>;
  table->geglu_backward = GegluBackward<T>;
  table->add_scale = AddScale<T>;
  table->scale = Scale<T>;
  table->softcap = Softcap<T>;
  table->softcap_backward = SoftcapBackward<T>;
  table->add = Add<T>;
}

template void AddElementOps(OpTable<float>*);
template void AddElementOps(OpTable<double>*);

}  // namespace retrace::cuda
