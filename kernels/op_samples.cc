#include "kernels/op_samples.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>

#include "core/philox.h"
#include "core/random_streams.h"

namespace retrace {
namespace {

using Limits = std::numeric_limits<float>;
constexpr float kSpecials[] = {0.0f,
                               -0.0f,
                               Limits::infinity(),
                               -Limits::infinity(),
                               Limits::max(),
                               -Limits::max(),
                               Limits::min(),
                               Limits::denorm_min(),
                               -1e-40f,
                               Limits::quiet_NaN(),
                               88.5f,
                               -63.9f,
                               -64.1f,
                               1e-20f,
                               -1e19f,
                               1.0f};

// Operands of one op: arrays that live as long as the sample that captures them.
class Operands {
 public:
  Operands(const OpSampleShape& shape, uint64_t first_stream) : s(shape), stream_(first_stream) {}

  std::vector<float> Out(int64_t count) {
    return SampleValues(s.seed, stream_++, count, s.special);
  }
  std::shared_ptr<const std::vector<float>> In(int64_t count) {
    return std::make_shared<const std::vector<float>>(Out(count));
  }
  std::vector<int32_t> Ids(int64_t count, int64_t end) {
    const RandomStream random =
        MakeRandomStream(s.seed, static_cast<uint32_t>(RandomPurpose::kSelftest), stream_++);
    std::vector<int32_t> ids(count);
    for (int64_t i = 0; i < count; ++i) {
      ids[i] = static_cast<int32_t>(RandomU32(random, i) % static_cast<uint32_t>(end));
    }
    return ids;
  }

  const OpSampleShape s;

 private:
  uint64_t stream_;
};

using Call = std::function<void(const OpTable<float>&, FloatArrays*)>;

OpSample Sample(const char* op, int64_t elements, FloatArrays initial, Call call) {
  return {op, elements, std::move(initial), std::move(call)};
}

void AddEmbedding(Operands x, std::vector<OpSample>* samples) {
  const OpSampleShape s = x.s;
  const int64_t first = 3, rows = 5, N = s.n, T = s.rows;
  const auto table = x.In(rows * N), dx = x.In(T * N);
  const auto ids = x.Ids(T, 10);
  samples->push_back(Sample("embed", T * N, {x.Out(T * N)}, [=](const auto& ops, FloatArrays* out) {
    ops.embed({table->data(), ids.data(), (*out)[0].data(), first, rows, N, s.scale, s.round}, 0,
              T);
  }));
  samples->push_back(
      Sample("embed_backward", T * N, {x.Out(rows * N)}, [=](const auto& ops, FloatArrays* out) {
        ops.embed_backward(
            {dx->data(), ids.data(), (*out)[0].data(), T, first, rows, N, 5, s.scale, s.round}, 0,
            N);
      }));
}

void AddNorms(Operands x, std::vector<OpSample>* samples) {
  const OpSampleShape s = x.s;
  const int64_t R = s.rows, N = s.n;
  const auto in = x.In(R * N), w = x.In(N), r = x.In(R), dy = x.In(R * N);
  for (const bool weighted : {true, false}) {
    const auto weight = [=] { return weighted ? w->data() : nullptr; };
    samples->push_back(
        Sample("rms_norm", R * N, {x.Out(R * N), x.Out(R)}, [=](const auto& ops, FloatArrays* out) {
          ops.rms_norm(
              {in->data(), weight(), (*out)[0].data(), (*out)[1].data(), N, 1e-6f, s.round}, 0, R);
        }));
    samples->push_back(
        Sample("rms_norm_backward", R * N, {x.Out(R * N)}, [=](const auto& ops, FloatArrays* out) {
          ops.rms_norm_backward(
              {in->data(), weight(), r->data(), dy->data(), (*out)[0].data(), N, s.round}, 0, R);
        }));
  }
  samples->push_back(
      Sample("rms_norm_weight", R * N, {x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
        ops.rms_norm_weight({in->data(), r->data(), dy->data(), (*out)[0].data(), R, N}, 0, N);
      }));
}

void AddRope(Operands x, std::vector<OpSample>* samples) {
  const OpSampleShape s = x.s;
  const int64_t half = s.n, heads = 2, length = 3, T = s.rows, size = T * heads * 2 * half;
  const auto in = x.In(size), cos = x.In(length * half), sin = x.In(length * half);
  for (const bool backward : {false, true}) {
    samples->push_back(Sample("rope", size, {x.Out(size)}, [=](const auto& ops, FloatArrays* out) {
      ops.rope({in->data(), (*out)[0].data(), cos->data(), sin->data(), length, heads, 2 * half,
                backward, s.round},
               0, T);
    }));
  }
}

void AddSoftmax(Operands x, std::vector<OpSample>* samples) {
  const OpSampleShape s = x.s;
  const int64_t S = s.n, R = std::max(s.rows, S), N = R * S;
  const auto p = x.In(N);
  samples->push_back(
      Sample("softmax", N, {x.Out(N), x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
        ops.softmax({(*out)[0].data(), (*out)[1].data(), S, s.window, s.scale, s.round, s.round}, 0,
                    R);
      }));
  samples->push_back(
      Sample("softmax_backward", N, {x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
        ops.softmax_backward({p->data(), (*out)[0].data(), S, s.window, s.scale, s.round}, 0, R);
      }));
}

// Queries before, across and behind the diagonal of a key block.
void AddBlockSoftmax(Operands x, std::vector<OpSample>* samples) {
  const OpSampleShape s = x.s;
  const int64_t R = s.rows, keys = s.n, stride = keys + 3, N = R * stride;
  const auto m = x.In(R), l = x.In(R), c = x.In(R);
  for (const int64_t query : {int64_t{62}, int64_t{64}, int64_t{130}}) {
    samples->push_back(
        Sample("online_softmax", R * keys, {x.Out(N), x.Out(R), x.Out(R), x.Out(R), x.Out(R)},
               [=](const auto& ops, FloatArrays* out) {
                 std::vector<uint8_t> touched(R, 9);
                 ops.online_softmax(
                     {(*out)[0].data(), (*out)[1].data(), (*out)[2].data(), (*out)[3].data(),
                      touched.data(), stride, query, 64, keys, s.window, s.scale, s.round, s.round},
                     0, R);
                 std::copy(touched.begin(), touched.end(), (*out)[4].begin());
               }));
    samples->push_back(Sample(
        "block_backward", R * keys, {x.Out(N), x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
          ops.block_backward(
              {(*out)[0].data(), (*out)[1].data(), m->data(), l->data(), c->data(), stride, query,
               64, keys, s.window, s.scale, s.round, s.round, s.round},
              0, R);
        }));
  }
}

void AddRows(Operands x, std::vector<OpSample>* samples) {
  const OpSampleShape s = x.s;
  const int64_t R = s.rows, N = s.n, stride = N + 4;
  const auto a = x.In(R * stride), b = x.In(R * stride), scale = x.In(R);
  std::vector<uint8_t> touched(R);
  for (int64_t i = 0; i < R; ++i) touched[i] = static_cast<uint8_t>(i % 3);
  samples->push_back(Sample("row_dot", R * N, {x.Out(R)}, [=](const auto& ops, FloatArrays* out) {
    ops.row_dot({a->data(), b->data(), (*out)[0].data(), N, stride, stride}, 0, R);
  }));
  samples->push_back(
      Sample("rescale_add", R * N, {x.Out(R * stride)}, [=](const auto& ops, FloatArrays* out) {
        ops.rescale_add({(*out)[0].data(), a->data(), scale->data(), touched.data(), N, stride}, 0,
                        R);
      }));
  samples->push_back(
      Sample("row_divide", R * N, {x.Out(R * stride)}, [=](const auto& ops, FloatArrays* out) {
        ops.row_divide({(*out)[0].data(), scale->data(), N, stride, s.round}, 0, R);
      }));
}

void AddActivations(Operands x, std::vector<OpSample>* samples) {
  const OpSampleShape s = x.s;
  const int64_t N = s.rows * s.n;
  const float cap = 30 * s.scale;
  const auto a = x.In(N), b = x.In(N), c = x.In(N);
  samples->push_back(Sample("geglu", N, {x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
    ops.geglu({a->data(), b->data(), (*out)[0].data(), s.round, s.round}, 0, N);
  }));
  samples->push_back(
      Sample("geglu_backward", N, {x.Out(N), x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
        ops.geglu_backward({a->data(), b->data(), c->data(), (*out)[0].data(), (*out)[1].data(),
                            s.round, s.round, s.round},
                           0, N);
      }));
  samples->push_back(
      Sample("softcap", N, {x.Out(N), x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
        ops.softcap({(*out)[0].data(), (*out)[1].data(), cap, s.round}, 0, N);
      }));
  samples->push_back(
      Sample("softcap_backward", N, {x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
        ops.softcap_backward({(*out)[0].data(), a->data(), cap, s.round}, 0, N);
      }));
}

void AddSums(Operands x, std::vector<OpSample>* samples) {
  const OpSampleShape s = x.s;
  const int64_t N = s.rows * s.n;
  const auto a = x.In(N), b = x.In(N);
  samples->push_back(Sample("add_scale", N, {x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
    ops.add_scale({a->data(), b->data(), (*out)[0].data(), s.scale, s.round, s.round}, 0, N);
  }));
  samples->push_back(Sample("scale", N, {x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
    ops.scale({a->data(), (*out)[0].data(), s.scale, s.round}, 0, N);
  }));
  samples->push_back(Sample("add", N, {x.Out(N)}, [=](const auto& ops, FloatArrays* out) {
    ops.add({(*out)[0].data(), a->data(), s.round}, 0, N);
  }));
}

void AddCrossEntropy(Operands x, std::vector<OpSample>* samples) {
  const OpSampleShape s = x.s;
  const int64_t R = s.rows, N = s.n, first = 2;
  const auto z = x.In(R * N), m = x.In(R), sum = x.In(R);
  const auto labels = x.Ids(R, N + 4);
  samples->push_back(Sample("row_max", R * N, {x.Out(R)}, [=](const auto& ops, FloatArrays* out) {
    ops.row_max({z->data(), (*out)[0].data(), N}, 0, R);
  }));
  samples->push_back(
      Sample("sum_exp", R * N, {x.Out(R), x.Out(R)}, [=](const auto& ops, FloatArrays* out) {
        ops.sum_exp(
            {z->data(), m->data(), labels.data(), (*out)[0].data(), (*out)[1].data(), first, N}, 0,
            R);
      }));
  samples->push_back(Sample(
      "cross_entropy_backward", R * N, {x.Out(R * N)}, [=](const auto& ops, FloatArrays* out) {
        ops.cross_entropy_backward({(*out)[0].data(), m->data(), sum->data(), labels.data(), first,
                                    N, s.scale / 7, s.round},
                                   0, R);
      }));
}

uint32_t BitsOf(float x) { return x == x ? std::bit_cast<uint32_t>(x) : 0x7fc00000u; }

}  // namespace

std::vector<OpSample> OpSamples(const OpSampleShape& shape) {
  std::vector<OpSample> samples;
  uint64_t stream = 0;
  for (const auto add : {AddEmbedding, AddNorms, AddRope, AddSoftmax, AddBlockSoftmax, AddRows,
                         AddActivations, AddSums, AddCrossEntropy}) {
    add(Operands(shape, stream), &samples);
    stream += 100;
  }
  return samples;
}

std::vector<float> SampleValues(uint64_t seed, uint64_t stream, int64_t count, bool special) {
  const RandomStream random =
      MakeRandomStream(seed, static_cast<uint32_t>(RandomPurpose::kSelftest), stream);
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) {
    const PhiloxBlock block = RandomBlock(random, i);
    // Both signs, 23 random bits, sizes from 2^-5 to 2^4.
    const uint32_t sign = block.words[0] & 0x80000000u, mantissa = block.words[0] & 0x7fffffu;
    const uint32_t exponent = 122 + block.words[1] % 9;
    values[i] = std::bit_cast<float>(sign | exponent << 23 | mantissa);
    if (special && block.words[2] % 8 == 0) values[i] = kSpecials[block.words[3] % 16];
  }
  return values;
}

int64_t FirstBitDifference(const std::vector<float>& a, const std::vector<float>& b) {
  const size_t common = std::min(a.size(), b.size());
  for (size_t i = 0; i < common; ++i) {
    if (BitsOf(a[i]) != BitsOf(b[i])) return static_cast<int64_t>(i);
  }
  return a.size() == b.size() ? -1 : static_cast<int64_t>(common);
}

}  // namespace retrace
