// Blockwise attention (clause 9) on a CUDA device: the tiles of device_product.h and the rows of
// device_softmax.h, one block of threads to a block of queries or keys of a head. Scores and
// probabilities of a pair of blocks pass through the block's part of the workspace.
#include "kernels/cuda/device_attention.h"
#include "kernels/cuda/device_product.h"
#include "kernels/cuda/device_softmax.h"

namespace retrace::cuda {
namespace {

template <class T>
using Shape = typename ProductTiles<T>::Small;

constexpr int64_t kSquare = kAttentionBlock * kAttentionBlock;
// Of a block of threads, in elements: scores, their gradient, a, touched.
constexpr int64_t kWorkspace = 2 * kSquare + 2 * kAttentionBlock;

// A block's part of the workspace, laid out as kernels/attention.cc lays out a worker's tile.
template <class T>
struct PairSpace {
  T *s, *dp, *a;
  uint8_t* touched;

  RT_DEVICE explicit PairSpace(T* workspace) {
    s = workspace + blockIdx.x * kWorkspace;
    dp = s + kSquare;
    a = dp + kSquare;
    touched = reinterpret_cast<uint8_t*>(a + kAttentionBlock);
  }
};

// Pointers and strides of one (sequence, query head).
template <class T>
struct DeviceHead {
  int64_t q_stride, kv_stride, q_offset, kv_offset, rows_offset, own_offset;
  bool opens_group;

  RT_DEVICE DeviceHead(const BlockwiseAttention<T>& c, int64_t sequence, int64_t head) {
    const int64_t kv_head = head * c.kv_heads / c.query_heads;
    q_stride = c.query_heads * c.dim;
    kv_stride = c.kv_heads * c.dim;
    q_offset = sequence * c.length * q_stride + head * c.dim;
    kv_offset = sequence * c.length * kv_stride + kv_head * c.dim;
    rows_offset = (sequence * c.query_heads + head) * c.length;
    own_offset = (head * c.sequences + sequence) * c.length * c.dim;
    opens_group = head == 0 || (head - 1) * c.kv_heads / c.query_heads != kv_head;
  }
  // Where dk or dv of this head goes: straight to the KV head, or apart to be added after.
  RT_DEVICE T* target(T* dkv, T* apart) const {
    return opens_group ? dkv + kv_offset : apart + own_offset;
  }
  RT_DEVICE int64_t target_stride(int64_t dim) const { return opens_group ? kv_stride : dim; }
};

// Does any query of [query_first, query_last) see a key of [key_first, key_last)?
RT_DEVICE bool BlocksMeet(int64_t query_first, int64_t query_last, int64_t key_first,
                          int64_t key_last, int64_t window) {
  return key_first < query_last && Visible(query_first, window).first < key_last;
}

// out(row, col) = what `finish` makes of it and of element (row, col) of A B, for rows x cols.
template <class T, class Finish>
RT_DEVICE void Product(const Operand<T>& a, const Operand<T>& b, int64_t k, const Finish& finish) {
  using S = Shape<T>;
  T sum[S::kThreadRows][S::kThreadCols];
  ProductTile<T, S>(a, b, k, sum);
  RT_UNROLL
  for (int i = 0; i < S::kThreadRows; ++i) {
    if (S::Row(i) >= a.count) continue;
    RT_UNROLL
    for (int j = 0; j < S::kThreadCols; ++j) {
      if (S::Col(j) < b.count) finish(S::Row(i), S::Col(j), sum[i][j]);
    }
  }
}

// A pair of blocks: queries [query, query + queries) and keys [key, key + keys) of a head.
template <class T>
struct Pair {
  const BlockwiseAttention<T>& c;
  const DeviceHead<T>& h;
  const PairSpace<T>& space;
  int64_t query, queries, key, keys;

  RT_DEVICE const T* q_block(const T* q) const { return q + h.q_offset + query * h.q_stride; }
  RT_DEVICE const T* k_block(const T* k) const { return k + h.kv_offset + key * h.kv_stride; }

  // to[i, j] = round(row i of x · row j of y), x a block of queries, y one of keys.
  RT_DEVICE void Scores(const T* x, const T* y, T* to, Rounding round) const {
    Product<T>({q_block(x), h.q_stride, 1, queries}, {k_block(y), h.kv_stride, 1, keys}, c.dim,
               [&](int i, int j, T s) { to[i * kAttentionBlock + j] = element::Rounded(s, round); });
  }

  // Clause 9's forward step of this pair.
  RT_DEVICE void Forward() const {
    Scores(c.q, c.k, space.s, c.scores);
    __syncthreads();
    const OnlineSoftmaxArgs<T> args = {
        .s = space.s, .m = c.m + h.rows_offset + query, .l = c.l + h.rows_offset + query,
        .a = space.a, .touched = space.touched, .stride = kAttentionBlock, .query_first = query,
        .key_first = key, .keys = keys, .window = c.window, .scale = c.scale,
        .round_scores = c.scores, .round = c.softmax};
    RT_FOR_ROWS_OF_BLOCK(i, queries) OnlineSoftmaxRow(args, i);
    __syncthreads();
    T* o = c.out + h.q_offset + query * h.q_stride;
    for (int64_t d = 0; d < c.dim; d += kAttentionBlock) {
      Product<T>({space.s, kAttentionBlock, 1, queries},
                 {k_block(c.v) + d, 1, h.kv_stride, c.dim - d}, keys, [&](int i, int j, T t) {
                   const uint8_t touched = space.touched[i];
                   T& at = o[i * h.q_stride + d + j];
                   if (touched != 0) at = touched == 1 ? t : at * space.a[i] + t;
                 });
    }
  }

  // Probabilities and ds of this pair, from recomputed scores.
  RT_DEVICE void ScoreGradients() const {
    Scores(c.q, c.k, space.s, c.scores);
    Scores(c.dout, c.v, space.dp, c.grad_softmax);
    __syncthreads();
    const int64_t row = h.rows_offset + query;
    const BlockBackwardArgs<T> args = {
        .s = space.s, .dp = space.dp, .m = c.m + row, .l = c.l + row, .c = c.dot + row,
        .stride = kAttentionBlock, .query_first = query, .key_first = key, .keys = keys,
        .window = c.window, .scale = c.scale, .round_scores = c.scores, .round_p = c.softmax,
        .round = c.grad_scores};
    RT_FOR_ROWS_OF_BLOCK(i, queries) BlockBackwardRow(args, i);
    __syncthreads();
  }

  // to (rows x dim) = or += A B, A [rows, k], B [k, dim]; the product is finished before it is added.
  RT_DEVICE void Accumulate(const Operand<T>& a, const T* b, int64_t b_stride, int64_t k, T* to,
                            int64_t to_stride, bool first) const {
    for (int64_t d = 0; d < c.dim; d += kAttentionBlock) {
      Product<T>(a, {b + d, 1, b_stride, c.dim - d}, k, [&](int i, int j, T t) {
        T& at = to[i * to_stride + d + j];
        at = first ? t : at + t;
      });
    }
  }
};

#define RT_FOR_TASKS(task, tasks) \
  for (int64_t task = blockIdx.x; task < (tasks); task += gridDim.x)

RT_DEVICE int64_t BlocksOf(int64_t length) {
  return (length + kAttentionBlock - 1) / kAttentionBlock;
}
RT_DEVICE int64_t BlockSize(int64_t first, int64_t length) {
  return length - first < kAttentionBlock ? length - first : kAttentionBlock;
}

template <class T>
__global__ void __launch_bounds__(Shape<T>::kThreads, 1)
    ForwardKernel(const __grid_constant__ BlockwiseAttention<T> c) {
  const PairSpace<T> space(c.workspace);
  const int64_t blocks = BlocksOf(c.length), heads = c.sequences * c.query_heads;
  RT_FOR_TASKS(task, heads * blocks) {
    const DeviceHead<T> h(c, task / blocks / c.query_heads, task / blocks % c.query_heads);
    const int64_t query = task % blocks * kAttentionBlock, queries = BlockSize(query, c.length);
    for (int64_t key = 0; key < c.length; key += kAttentionBlock) {
      const int64_t keys = BlockSize(key, c.length);
      if (!BlocksMeet(query, query + queries, key, key + keys, c.window)) continue;
      Pair<T>{c, h, space, query, queries, key, keys}.Forward();
      __syncthreads();
    }
    for (int64_t e = threadIdx.x; e < queries * c.dim; e += blockDim.x) {
      T& o = c.out[h.q_offset + (query + e / c.dim) * h.q_stride + e % c.dim];
      o = element::Rounded(o / c.l[h.rows_offset + query + e / c.dim], c.output);
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(Shape<T>::kThreads, 1)
    QueryGradientKernel(const __grid_constant__ BlockwiseAttention<T> c) {
  const PairSpace<T> space(c.workspace);
  const int64_t blocks = BlocksOf(c.length), heads = c.sequences * c.query_heads;
  RT_FOR_TASKS(task, heads * blocks) {
    const DeviceHead<T> h(c, task / blocks / c.query_heads, task / blocks % c.query_heads);
    const int64_t query = task % blocks * kAttentionBlock, queries = BlockSize(query, c.length);
    T* dq = c.dq + h.q_offset + query * h.q_stride;
    for (int64_t key = 0; key < c.length; key += kAttentionBlock) {
      const int64_t keys = BlockSize(key, c.length);
      if (!BlocksMeet(query, query + queries, key, key + keys, c.window)) continue;
      const Pair<T> pair{c, h, space, query, queries, key, keys};
      pair.ScoreGradients();
      // The first key block that this query block sees opens its dq.
      pair.Accumulate({space.dp, kAttentionBlock, 1, queries}, pair.k_block(c.k), h.kv_stride, keys,
                      dq, h.q_stride, Visible(query, c.window).first >= key);
      __syncthreads();
    }
    if (c.grad_query == Rounding::kNone) continue;
    for (int64_t e = threadIdx.x; e < queries * c.dim; e += blockDim.x) {
      T& at = dq[e / c.dim * h.q_stride + e % c.dim];
      at = element::Rounded(at, c.grad_query);
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(Shape<T>::kThreads, 1)
    KeyGradientKernel(const __grid_constant__ BlockwiseAttention<T> c) {
  const PairSpace<T> space(c.workspace);
  const int64_t blocks = BlocksOf(c.length), heads = c.sequences * c.query_heads;
  RT_FOR_TASKS(task, heads * blocks) {
    const DeviceHead<T> h(c, task / blocks / c.query_heads, task / blocks % c.query_heads);
    const int64_t key = task % blocks * kAttentionBlock, keys = BlockSize(key, c.length);
    const int64_t stride = h.target_stride(c.dim);
    T* dk = h.target(c.dk, c.dk_head) + key * stride;
    T* dv = h.target(c.dv, c.dv_head) + key * stride;
    for (int64_t query = key; query < c.length; query += kAttentionBlock) {
      const int64_t queries = BlockSize(query, c.length);
      if (!BlocksMeet(query, query + queries, key, key + keys, c.window)) break;
      const Pair<T> pair{c, h, space, query, queries, key, keys};
      pair.ScoreGradients();
      pair.Accumulate({space.dp, 1, kAttentionBlock, keys}, pair.q_block(c.q), h.q_stride, queries,
                      dk, stride, query == key);
      pair.Accumulate({space.s, 1, kAttentionBlock, keys}, pair.q_block(c.dout), h.q_stride,
                      queries, dv, stride, query == key);
      __syncthreads();
    }
  }
}

template <class T>
__global__ void AddGroupsKernel(HeadGroups<T> a) {
  const int64_t tokens = a.sequences * a.length, count = tokens * a.kv_heads * a.dim;
  for (int64_t e = ThreadOfGrid(); e < count; e += ThreadsOfGrid()) {
    const int64_t d = e % a.dim, kv = e / a.dim % a.kv_heads, t = e / a.dim / a.kv_heads;
    T sum = a.dkv[e];
    bool opened = false;
    for (int64_t j = 0; j < a.query_heads; ++j) {
      if (j * a.kv_heads / a.query_heads != kv) continue;
      if (opened) sum = sum + a.heads[(j * tokens + t) * a.dim + d];
      opened = true;
    }
    a.dkv[e] = sum;
  }
}

template <class T>
dim3 GridOf(const BlockwiseAttention<T>& a) {
  const int64_t blocks = (a.length + kAttentionBlock - 1) / kAttentionBlock;
  constexpr int64_t kBlocksAtOnce = 1024;  // bounds the workspace
  const int64_t tasks = a.sequences * a.query_heads * blocks;
  return GridFor(tasks < kBlocksAtOnce ? tasks : kBlocksAtOnce, 1);
}

}  // namespace

template <class T>
int64_t DeviceAttentionWorkspace(const BlockwiseAttention<T>& a) {
  return GridOf(a).x * kWorkspace * static_cast<int64_t>(sizeof(T));
}

template <class T>
void DeviceAttentionForward(const BlockwiseAttention<T>& a) {
  Launch("AttentionForward", ForwardKernel<T>, GridOf(a), Shape<T>::kThreads, a);
}

template <class T>
void DeviceAttentionBackward(const BlockwiseAttention<T>& a) {
  Launch("AttentionQueryGradient", QueryGradientKernel<T>, GridOf(a), Shape<T>::kThreads, a);
  Launch("AttentionKeyGradient", KeyGradientKernel<T>, GridOf(a), Shape<T>::kThreads, a);
}

template <class T>
void DeviceAddGroups(const HeadGroups<T>& a) {
  const unsigned threads = launch_shape().threads;
  Launch("AddGroups", AddGroupsKernel<T>,
         GridFor(a.sequences * a.length * a.kv_heads * a.dim, threads), threads, a);
}

#define RT_INSTANTIATE(T)                                                \
  template int64_t DeviceAttentionWorkspace(const BlockwiseAttention<T>&); \
  template void DeviceAttentionForward(const BlockwiseAttention<T>&);    \
  template void DeviceAttentionBackward(const BlockwiseAttention<T>&);   \
  template void DeviceAddGroups(const HeadGroups<T>&);
RT_INSTANTIATE(float)
RT_INSTANTIATE(double)
#undef RT_INSTANTIATE

}  // namespace retrace::cuda
