#include "replay/shard_tree.h"

#include <bit>
#include <cstring>
#include <type_traits>

#include "core/scalar_math.h"

namespace retrace {
namespace {

// parts[0] = tree over parts, by combine(dst, src).
template <class T, class Combine>
void Tree(std::vector<T*> parts, Combine combine) {
  RT_CHECK(std::has_single_bit(parts.size()));
  for (size_t half = 1; half < parts.size(); half *= 2) {
    for (size_t i = 0; i < parts.size(); i += 2 * half) combine(parts[i], parts[i + half]);
  }
}

template <class T>
void RoundAll(Engine& engine, T* data, int64_t n, Rounding round) {
  if (round == Rounding::kNone) return;
  engine.Run(engine.ops<T>().scale,
             ScaleArgs<T>{.x = data, .y = data, .scale = T(1), .round = round}, n, 1, 16);
}

}  // namespace

// Each member gets one chunk of everybody's part, combines it by the tree, and hands it to all.
template <class T, class Combine>
Status ShardTree::AcrossRanks(T* data, int64_t n, int ranks, Combine combine) {
  const int mine = group_.IndexOf(comm_.rank());
  const RankGroup group = {group_.RankAt(mine / ranks * ranks), group_.stride, ranks};
  const int64_t chunk = ((n + ranks - 1) / ranks + 15) / 16 * 16;
  const size_t chunk_bytes = chunk * sizeof(T);
  engine_.Sync();
  send_.resize(ranks * chunk_bytes);
  receive_.resize(ranks * chunk_bytes);
  std::memcpy(send_.data(), data, n * sizeof(T));
  std::memset(send_.data() + n * sizeof(T), 0, send_.size() - n * sizeof(T));
  RT_RETURN_IF_ERROR(comm_.AllToAll(group, send_.data(), receive_.data(), chunk_bytes));
  std::vector<T*> parts;
  for (int i = 0; i < ranks; ++i) {
    parts.push_back(reinterpret_cast<T*>(receive_.data() + i * chunk_bytes));
  }
  Tree(parts, [&](T* dst, const T* src) { combine(dst, src, chunk); });
  engine_.Sync();
  RT_RETURN_IF_ERROR(comm_.AllGather(group, receive_.data(), send_.data(), chunk_bytes));
  std::memcpy(data, send_.data(), n * sizeof(T));
  return {};
}

template <class T>
Status ShardTree::Sum(const std::vector<T*>& partials, int64_t n, Rounding partial_round,
                      Rounding round, int ranks) {
  const auto add = [&](T* dst, const T* src, int64_t count) {
    engine_.Run(engine_.ops<T>().add,
                AddArgs<T>{.dst = dst, .src = src, .round = Rounding::kNone}, count, 1, 16);
  };
  for (T* partial : partials) RoundAll(engine_, partial, n, partial_round);
  Tree(partials, [&](T* dst, const T* src) { add(dst, src, n); });
  if (ranks == 0) ranks = group_.size;
  if (ranks > 1) RT_RETURN_IF_ERROR(AcrossRanks(partials[0], n, ranks, add));
  RoundAll(engine_, partials[0], n, round);
  return {};
}

template <class T>
Status ShardTree::Merge(const std::vector<T*>& partials, int64_t n) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  const auto merge = [](T* dst, const T* src, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      dst[i] = std::bit_cast<T>(std::bit_cast<Bits>(dst[i]) | std::bit_cast<Bits>(src[i]));
    }
  };
  engine_.Sync();
  Tree(partials, [&](T* dst, const T* src) { merge(dst, src, n); });
  return group_.size > 1 ? AcrossRanks(partials[0], n, group_.size, merge) : Status();
}

template <class T>
Status ShardTree::Max(const std::vector<T*>& partials, int64_t n) {
  const auto max = [](T* dst, const T* src, int64_t count) {
    for (int64_t i = 0; i < count; ++i) dst[i] = math::Max(dst[i], src[i]);
  };
  engine_.Sync();
  Tree(partials, [&](T* dst, const T* src) { max(dst, src, n); });
  return group_.size > 1 ? AcrossRanks(partials[0], n, group_.size, max) : Status();
}

#define RT_INSTANTIATE(T)                                                                     \
  template Status ShardTree::Sum(const std::vector<T*>&, int64_t, Rounding, Rounding, int);   \
  template Status ShardTree::Merge(const std::vector<T*>&, int64_t);                          \
  template Status ShardTree::Max(const std::vector<T*>&, int64_t);
RT_INSTANTIATE(float)
RT_INSTANTIATE(double)
#undef RT_INSTANTIATE

}  // namespace retrace
