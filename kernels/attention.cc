#include "kernels/attention.h"

#include <algorithm>

namespace retrace {
namespace {

// Pointers and strides of one (sequence, query head).
template <class T>
struct Head {
  const AttentionConfig<T>& c;
  int64_t sequence, head;

  int64_t q_stride() const { return c.query_heads * c.dim; }
  int64_t kv_stride() const { return c.kv_heads * c.dim; }
  int64_t kv_head() const { return head * c.kv_heads / c.query_heads; }
  int64_t q_offset() const { return sequence * c.length * q_stride() + head * c.dim; }
  int64_t kv_offset() const { return sequence * c.length * kv_stride() + kv_head() * c.dim; }
  int64_t rows_offset() const { return (sequence * c.query_heads + head) * c.length; }
  bool opens_group() const {
    return head == 0 || (head - 1) * c.kv_heads / c.query_heads != kv_head();
  }
  // Where this head's dk or dv goes: straight to the KV head, or to scratch to be added after.
  T* grad_target(T* dkv, ComputeVector<T>& scratch) const {
    if (opens_group()) return dkv + kv_offset();
    return scratch.data() + head * c.sequences * c.length * c.dim +
           sequence * c.length * c.dim;
  }
  int64_t grad_stride() const { return opens_group() ? kv_stride() : c.dim; }
};

template <class T, class F>
void ForEachHead(const AttentionConfig<T>& c, F f) {
  for (int64_t b = 0; b < c.sequences; ++b) {
    for (int64_t j = 0; j < c.query_heads; ++j) f(Head<T>{c, b, j});
  }
}

template <class T>
GemmArgs<T> Product(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col,
                    const T* b, int64_t b_row, int64_t b_col, T* out, int64_t out_row,
                    Rounding round) {
  return {.m = m, .n = n, .k = k, .a = a, .a_row_stride = a_row, .a_col_stride = a_col, .b = b,
          .b_row_stride = b_row, .b_col_stride = b_col, .c = out, .c_row_stride = out_row,
          .round = round};
}

template <class T>
int64_t SquareNumel(const AttentionConfig<T>& c) {
  return c.sequences * c.query_heads * c.length * c.length;
}

template <class T>
void ForwardMaterialised(Engine& engine, const AttentionConfig<T>& c, const T* q, const T* k,
                         const T* v, T* output, AttentionSaved<T>* saved,
                         AttentionScratch<T>* scratch) {
  const int64_t S = c.length, D = c.dim;
  saved->p.resize(SquareNumel(c));
  const bool rounded = c.softmax != Rounding::kNone;
  if (rounded) scratch->p_rounded.resize(SquareNumel(c));
  std::vector<GemmArgs<T>> products;
  ForEachHead(c, [&](const Head<T>& h) {
    products.push_back(Product(S, S, D, q + h.q_offset(), h.q_stride(), int64_t{1},
                               k + h.kv_offset(), int64_t{1}, h.kv_stride(),
                               saved->p.data() + h.rows_offset() * S, S, c.scores));
  });
  engine.MultiplyBatch<T>(products);
  const SoftmaxArgs<T> softmax = {.s_RS = saved->p.data(),
                                  .p_rounded_RS = rounded ? scratch->p_rounded.data() : nullptr,
                                  .length = S, .window = c.window, .scale = c.scale,
                                  .round_scores = c.scores, .round = c.softmax};
  engine.Run(&OpTable<T>::softmax, softmax, c.sequences * c.query_heads * S, 8 * S);
  const T* p = rounded ? scratch->p_rounded.data() : saved->p.data();
  products.clear();
  ForEachHead(c, [&](const Head<T>& h) {
    products.push_back(Product(S, D, S, p + h.rows_offset() * S, S, int64_t{1},
                               v + h.kv_offset(), h.kv_stride(), int64_t{1},
                               output + h.q_offset(), h.q_stride(), c.output));
  });
  engine.MultiplyBatch<T>(products);
}

// Adds the heads after the first of each group, ascending, to the KV head's gradient.
template <class T>
void AddGroups(Engine& engine, const AttentionConfig<T>& c, const ComputeVector<T>& heads, T* dkv) {
  if (c.kv_heads == c.query_heads) return;
  if (engine.device() != nullptr) {
    return engine.device()->AddGroups(HeadGroups<T>{
        .sequences = c.sequences, .length = c.length, .query_heads = c.query_heads,
        .kv_heads = c.kv_heads, .dim = c.dim, .heads = heads.data(), .dkv = dkv});
  }
  const int64_t D = c.dim, tokens = c.sequences * c.length;
  engine.pool().Run(c.kv_heads * c.sequences, [&](int64_t task, int) {
    const int64_t kv = task / c.sequences, b = task % c.sequences;
    for (int64_t j = 0; j < c.query_heads; ++j) {
      const Head<T> h{c, b, j};
      if (h.kv_head() != kv || h.opens_group()) continue;
      for (int64_t t = 0; t < c.length; ++t) {
        const AddArgs<T> add = {
            .dst = dkv + h.kv_offset() + t * h.kv_stride(),
            .src = heads.data() + j * tokens * D + (b * c.length + t) * D,
            .round = Rounding::kNone};
        engine.ops<T>().add(add, 0, D);
      }
    }
  });
}

template <class T>
void BackwardMaterialised(Engine& engine, const AttentionConfig<T>& c, const T* q, const T* k,
                          const T* v, const T* doutput, const AttentionSaved<T>& saved, T* dq,
                          T* dk, T* dv, AttentionScratch<T>* scratch) {
  const int64_t S = c.length, D = c.dim;
  scratch->dp.resize(SquareNumel(c));
  const T* p = saved.p.data();
  if (c.softmax != Rounding::kNone) {  // the product with v used the rounded probabilities
    scratch->p_rounded.resize(SquareNumel(c));
    const ScaleArgs<T> round = {.x = p, .y = scratch->p_rounded.data(), .scale = T(1),
                                .round = c.softmax};
    engine.Run(engine.ops<T>().scale, round, SquareNumel(c), 1, 16);
    p = scratch->p_rounded.data();
  }
  T* dp = scratch->dp.data();
  std::vector<GemmArgs<T>> products;
  ForEachHead(c, [&](const Head<T>& h) {
    products.push_back(Product(S, S, D, doutput + h.q_offset(), h.q_stride(), int64_t{1},
                               v + h.kv_offset(), int64_t{1}, h.kv_stride(),
                               dp + h.rows_offset() * S, S, c.grad_softmax));
    products.push_back(Product(S, D, S, p + h.rows_offset() * S, int64_t{1}, S,
                               doutput + h.q_offset(), h.q_stride(), int64_t{1},
                               h.grad_target(dv, scratch->dv_head), h.grad_stride(),
                               Rounding::kNone));
  });
  engine.MultiplyBatch<T>(products);
  const SoftmaxBackwardArgs<T> softmax = {.p_RS = saved.p.data(), .dp_RS = dp, .length = S,
                                          .window = c.window, .scale = c.scale,
                                          .round = c.grad_scores};
  engine.Run(&OpTable<T>::softmax_backward, softmax, c.sequences * c.query_heads * S,
             4 * S);
  products.clear();
  ForEachHead(c, [&](const Head<T>& h) {
    const T* ds = dp + h.rows_offset() * S;
    products.push_back(Product(S, D, S, ds, S, int64_t{1}, k + h.kv_offset(), h.kv_stride(),
                               int64_t{1}, dq + h.q_offset(), h.q_stride(), c.grad_query));
    products.push_back(Product(S, D, S, ds, int64_t{1}, S, q + h.q_offset(), h.q_stride(),
                               int64_t{1}, h.grad_target(dk, scratch->dk_head), h.grad_stride(),
                               Rounding::kNone));
  });
  engine.MultiplyBatch<T>(products);
}

// What both directions of a device's attention are given.
template <class T>
BlockwiseAttention<T> OnDevice(const AttentionConfig<T>& c, const T* q, const T* k, const T* v) {
  BlockwiseAttention<T> a = {};
  a.sequences = c.sequences, a.length = c.length, a.dim = c.dim, a.window = c.window;
  a.query_heads = c.query_heads, a.kv_heads = c.kv_heads;
  a.scale = c.scale;
  a.scores = c.scores, a.softmax = c.softmax, a.output = c.output;
  a.grad_scores = c.grad_scores, a.grad_softmax = c.grad_softmax, a.grad_query = c.grad_query;
  a.q = q, a.k = k, a.v = v;
  return a;
}

// Does any query of [query_first, query_last) see a key of [key_first, key_last)?
bool AnyVisible(int64_t query_first, int64_t query_last, int64_t key_first, int64_t key_last,
                int64_t window) {
  return key_first < query_last && Visible(query_first, window).first < key_last;
}

template <class T>
struct Tile {  // one worker's buffers for a pair of blocks
  T *s, *dp, *t, *a;

  Tile(std::vector<T>& memory, int64_t dim) {
    constexpr int64_t kSquare = kAttentionBlock * kAttentionBlock;
    memory.resize(2 * kSquare + kAttentionBlock * (dim + 1));
    s = memory.data();
    dp = s + kSquare;
    t = dp + kSquare;
    a = t + kAttentionBlock * dim;
  }
};

template <class T>
void ForwardQueryBlock(Engine& engine, const Head<T>& h, int64_t query_first, const T* q,
                       const T* k, const T* v, T* output, AttentionSaved<T>* saved,
                       const Tile<T>& tile, GemmScratch& gemm) {
  const AttentionConfig<T>& c = h.c;
  const OpTable<T>& ops = engine.ops<T>();
  const int64_t queries = std::min(kAttentionBlock, c.length - query_first);
  T* o = output + h.q_offset() + query_first * h.q_stride();
  T* m = saved->m.data() + h.rows_offset() + query_first;
  T* l = saved->l.data() + h.rows_offset() + query_first;
  uint8_t touched[kAttentionBlock];
  for (int64_t key = 0; key < c.length; key += kAttentionBlock) {
    const int64_t keys = std::min(kAttentionBlock, c.length - key);
    if (!AnyVisible(query_first, query_first + queries, key, key + keys, c.window)) continue;
    GemmSerial(engine.isa(),
               Product(queries, keys, c.dim, q + h.q_offset() + query_first * h.q_stride(),
                       h.q_stride(), int64_t{1}, k + h.kv_offset() + key * h.kv_stride(),
                       int64_t{1}, h.kv_stride(), tile.s, kAttentionBlock, c.scores),
               gemm);
    ops.online_softmax({.s = tile.s, .m = m, .l = l, .a = tile.a, .touched = touched,
                        .stride = kAttentionBlock, .query_first = query_first, .key_first = key,
                        .keys = keys, .window = c.window, .scale = c.scale,
                        .round_scores = c.scores, .round = c.softmax},
                       0, queries);
    GemmSerial(engine.isa(),
               Product(queries, c.dim, keys, static_cast<const T*>(tile.s), kAttentionBlock,
                       int64_t{1}, v + h.kv_offset() + key * h.kv_stride(), h.kv_stride(),
                       int64_t{1}, tile.t, c.dim, Rounding::kNone),
               gemm);
    ops.rescale_add({.o = o, .t = tile.t, .a = tile.a, .touched = touched, .n = c.dim,
                     .o_stride = h.q_stride()},
                    0, queries);
  }
  ops.row_divide({.o = o, .l = l, .n = c.dim, .stride = h.q_stride(), .round = c.output}, 0,
                 queries);
}

template <class T>
void ForwardBlockwise(Engine& engine, const AttentionConfig<T>& c, const T* q, const T* k,
                      const T* v, T* output, AttentionSaved<T>* saved,
                      AttentionScratch<T>* scratch) {
  saved->m.resize(c.sequences * c.query_heads * c.length);
  saved->l.resize(saved->m.size());
  if (engine.device() != nullptr) {
    BlockwiseAttention<T> a = OnDevice(c, q, k, v);
    a.out = output, a.m = saved->m.data(), a.l = saved->l.data();
    return engine.device()->AttentionForward(a);
  }
  scratch->tile.resize(engine.threads());
  const int64_t blocks = (c.length + kAttentionBlock - 1) / kAttentionBlock;
  engine.pool().Run(c.sequences * c.query_heads * blocks, [&](int64_t task, int worker) {
    const int64_t head = task / blocks, query_first = task % blocks * kAttentionBlock;
    const Tile<T> tile(scratch->tile[worker], c.dim);
    ForwardQueryBlock(engine, Head<T>{c, head / c.query_heads, head % c.query_heads}, query_first,
                      q, k, v, output, saved, tile, engine.scratch(worker));
  });
}

// One (key block, query block) pair of one head; `first_query`: dk and dv are not yet begun;
// `first_key`: nor is dq.
template <class T>
struct BackwardPair {
  Engine& engine;
  const Head<T>& h;
  const T *q, *k, *v, *doutput;
  const AttentionSaved<T>& saved;
  const T* dot;
  T *dq, *dk, *dv;  // of this head; dk and dv with h.grad_stride()
  const Tile<T>& tile;
  GemmScratch& gemm;

  // out (rows x dim) = or += A (rows x inner) * B (inner x dim)
  void Accumulate(int64_t rows, int64_t inner, const T* a, int64_t a_row, int64_t a_col,
                  const T* b, int64_t b_row, T* out, int64_t out_row, bool first) const {
    GemmArgs<T> product = Product(rows, h.c.dim, inner, a, a_row, a_col, b, b_row, int64_t{1},
                                  out, out_row, Rounding::kNone);
    product.add = !first;
    GemmSerial(engine.isa(), product, gemm);
  }

  void Run(int64_t query, int64_t queries, int64_t key, int64_t keys, bool first_query,
           bool first_key) const {
    const AttentionConfig<T>& c = h.c;
    const T* q_block = q + h.q_offset() + query * h.q_stride();
    const T* do_block = doutput + h.q_offset() + query * h.q_stride();
    const T* k_block = k + h.kv_offset() + key * h.kv_stride();
    const T* v_block = v + h.kv_offset() + key * h.kv_stride();
    GemmSerial(engine.isa(),
               Product(queries, keys, c.dim, q_block, h.q_stride(), int64_t{1}, k_block,
                       int64_t{1}, h.kv_stride(), tile.s, kAttentionBlock, c.scores),
               gemm);
    GemmSerial(engine.isa(),
               Product(queries, keys, c.dim, do_block, h.q_stride(), int64_t{1}, v_block,
                       int64_t{1}, h.kv_stride(), tile.dp, kAttentionBlock, c.grad_softmax),
               gemm);
    const int64_t row = h.rows_offset() + query;
    engine.ops<T>()
        .block_backward({.s = tile.s, .dp = tile.dp, .m = saved.m.data() + row,
                         .l = saved.l.data() + row, .c = dot + row, .stride = kAttentionBlock,
                         .query_first = query, .key_first = key, .keys = keys,
                         .window = c.window, .scale = c.scale, .round_scores = c.scores,
                         .round_p = c.softmax, .round = c.grad_scores},
                        0, queries);
    Accumulate(queries, keys, tile.dp, kAttentionBlock, 1, k_block, h.kv_stride(),
               dq + h.q_offset() + query * h.q_stride(), h.q_stride(), first_key);
    Accumulate(keys, queries, tile.dp, 1, kAttentionBlock, q_block, h.q_stride(),
               dk + key * h.grad_stride(), h.grad_stride(), first_query);
    Accumulate(keys, queries, tile.s, 1, kAttentionBlock, do_block, h.q_stride(),
               dv + key * h.grad_stride(), h.grad_stride(), first_query);
  }
};

template <class T>
void BackwardHead(const BackwardPair<T>& pair) {
  const AttentionConfig<T>& c = pair.h.c;
  for (int64_t key = 0; key < c.length; key += kAttentionBlock) {
    const int64_t keys = std::min(kAttentionBlock, c.length - key);
    bool first_query = true;
    for (int64_t query = key; query < c.length; query += kAttentionBlock) {
      const int64_t queries = std::min(kAttentionBlock, c.length - query);
      if (!AnyVisible(query, query + queries, key, key + keys, c.window)) break;
      // The first key block that this query block sees opens its dq.
      const bool first_key = Visible(query, c.window).first >= key;
      pair.Run(query, queries, key, keys, first_query, first_key);
      first_query = false;
    }
  }
}

template <class T>
void DeviceBackward(Engine& engine, const AttentionConfig<T>& c, BlockwiseAttention<T> a,
                    const T* output, const T* doutput, const AttentionSaved<T>& saved, T* dq,
                    T* dk, T* dv, AttentionScratch<T>* scratch) {
  ForEachHead(c, [&](const Head<T>& h) {
    engine.Run(engine.ops<T>().row_dot,
               RowDotArgs<T>{.x = doutput + h.q_offset(), .y = output + h.q_offset(),
                             .c = scratch->dot.data() + h.rows_offset(), .n = c.dim,
                             .x_stride = h.q_stride(), .y_stride = h.q_stride()},
               c.length, c.dim);
  });
  a.dout = doutput, a.dot = scratch->dot.data();
  a.m = const_cast<T*>(saved.m.data()), a.l = const_cast<T*>(saved.l.data());  // read only
  a.dq = dq, a.dk = dk, a.dv = dv;
  a.dk_head = scratch->dk_head.data(), a.dv_head = scratch->dv_head.data();
  engine.device()->AttentionBackward(a);
}

template <class T>
void BackwardBlockwise(Engine& engine, const AttentionConfig<T>& c, const T* q, const T* k,
                       const T* v, const T* output, const T* doutput,
                       const AttentionSaved<T>& saved, T* dq, T* dk, T* dv,
                       AttentionScratch<T>* scratch) {
  const OpTable<T>& ops = engine.ops<T>();
  scratch->dot.resize(saved.m.size());
  if (engine.device() != nullptr) {
    return DeviceBackward(engine, c, OnDevice(c, q, k, v), output, doutput, saved, dq, dk, dv,
                          scratch);
  }
  scratch->tile.resize(engine.threads());
  engine.pool().Run(c.sequences * c.query_heads, [&](int64_t task, int worker) {
    const Head<T> h{c, task / c.query_heads, task % c.query_heads};
    ops.row_dot({.x = doutput + h.q_offset(), .y = output + h.q_offset(),
                 .c = scratch->dot.data() + h.rows_offset(), .n = c.dim,
                 .x_stride = h.q_stride(), .y_stride = h.q_stride()},
                0, c.length);
    const Tile<T> tile(scratch->tile[worker], c.dim);
    BackwardHead<T>({engine, h, q, k, v, doutput, saved, scratch->dot.data(), dq,
                     h.grad_target(dk, scratch->dk_head), h.grad_target(dv, scratch->dv_head),
                     tile, engine.scratch(worker)});
    for (int64_t t = 0; c.grad_query != Rounding::kNone && t < c.length; ++t) {
      T* row = dq + h.q_offset() + t * h.q_stride();
      ops.scale({.x = row, .y = row, .scale = T(1), .round = c.grad_query}, 0, c.dim);
    }
  });
}

}  // namespace

template <class T>
void AttentionForward(Engine& engine, const AttentionConfig<T>& config, const T* q, const T* k,
                      const T* v, T* output, AttentionSaved<T>* saved,
                      AttentionScratch<T>* scratch) {
  if (config.kind == AttentionKind::kMaterialised) {
    ForwardMaterialised(engine, config, q, k, v, output, saved, scratch);
  } else {
    ForwardBlockwise(engine, config, q, k, v, output, saved, scratch);
  }
}

template <class T>
void AttentionBackward(Engine& engine, const AttentionConfig<T>& config, const T* q, const T* k,
                       const T* v, const T* output, const T* doutput,
                       const AttentionSaved<T>& saved, T* dq, T* dk, T* dv,
                       AttentionScratch<T>* scratch) {
  if (config.kv_heads != config.query_heads) {
    const int64_t numel = config.query_heads * config.sequences * config.length * config.dim;
    scratch->dk_head.resize(numel);
    scratch->dv_head.resize(numel);
  }
  if (config.kind == AttentionKind::kMaterialised) {
    BackwardMaterialised(engine, config, q, k, v, doutput, saved, dq, dk, dv, scratch);
  } else {
    BackwardBlockwise(engine, config, q, k, v, output, doutput, saved, dq, dk, dv, scratch);
  }
  AddGroups(engine, config, scratch->dk_head, dk);
  AddGroups(engine, config, scratch->dv_head, dv);
}

template void AttentionForward(Engine&, const AttentionConfig<float>&, const float*, const float*,
                               const float*, float*, AttentionSaved<float>*,
                               AttentionScratch<float>*);
template void AttentionForward(Engine&, const AttentionConfig<double>&, const double*,
                               const double*, const double*, double*, AttentionSaved<double>*,
                               AttentionScratch<double>*);
template void AttentionBackward(Engine&, const AttentionConfig<float>&, const float*, const float*,
                                const float*, const float*, const float*,
                                const AttentionSaved<float>&, float*, float*, float*,
                                AttentionScratch<float>*);
template void AttentionBackward(Engine&, const AttentionConfig<double>&, const double*,
                                const double*, const double*, const double*, const double*,
                                const AttentionSaved<double>&, double*, double*, double*,
                                AttentionScratch<double>*);

}  // namespace retrace
