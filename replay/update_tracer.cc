#include "replay/update_tracer.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <map>
#include <sstream>

#include "core/scalar_math.h"
#include "replay/exchange.h"
#include "replay/whole_trace.h"

namespace retrace {
namespace {

// The number behind `prefix`, up to a slash or the end; -1: there is none.
int64_t NumberBehind(std::string_view text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return -1;
  int64_t number = -1;
  const char* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data() + prefix.size(), last, number);
  return error == std::errc() && (end == last || *end == '/') ? number : -1;
}

std::string SeenText(const auto& key, const UpdateTracer::TracedOp& op) {
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {} {}\n", key[0], key[1], key[2], key[3],
                     key[4], op.name, op.type == TensorType::kF64 ? 1 : 0, op.rows, op.cols,
                     op.digest->Hex(), std::bit_cast<uint64_t>(op.l2),
                     std::bit_cast<uint64_t>(op.max), op.kept ? 1 : 0, op.offset);
}

}  // namespace

void UpdateTracer::Op(const std::string& name, const float* data, int64_t rows, int64_t cols) {
  if (options_.before != nullptr) options_.before->Op(name, data, rows, cols);
  See(name, data, rows, cols);
}

void UpdateTracer::Op(const std::string& name, const double* data, int64_t rows, int64_t cols) {
  if (options_.before != nullptr) options_.before->Op(name, data, rows, cols);
  See(name, data, rows, cols);
}

UpdateTracer::Key UpdateTracer::KeyOf(const std::string& name) const {
  std::array<int64_t, 3> section = {3, 0, 0};
  const int64_t batch = NumberBehind(name, "mb"), lanes = job_.recipe().topology.lanes;
  if (batch >= 0) section = {2, batch % lanes, batch};
  if (name.starts_with("evaluation")) section = {1, 0, 0};
  if (name.starts_with("state/")) section = {0, 0, 0};
  std::string whole = name;
  return {section[0], section[1], section[2], 0, TakeShard(&whole)};
}

Status UpdateTracer::Keep(const void* data, TracedOp* op) {
  op->kept = true;
  op->offset = memory_.size();
  if (options_.spill_dir.empty()) {
    memory_.append(static_cast<const char*>(data), op->size_bytes());
    return {};
  }
  if (!spill_) {
    RT_ASSIGN_OR_RETURN(spill_, SpillFile::Create(options_.spill_dir));
  }
  RT_ASSIGN_OR_RETURN(op->offset, spill_->Append(data, op->size_bytes()));
  return {};
}

template <class T>
void UpdateTracer::See(const std::string& name, const T* data, int64_t rows, int64_t cols) {
  const Key key = KeyOf(name);
  if (key[0] == 1 && !options_.evaluation) return;
  TracedOp op;
  op.name = name;
  op.type = sizeof(T) == 8 ? TensorType::kF64 : TensorType::kF32;
  op.rows = rows;
  op.cols = cols;
  std::vector<T> canonical(data, data + rows * cols);
  double squares = 0;
  for (T& x : canonical) {
    x = math::CanonicalNan(x);
    squares += static_cast<double>(x) * static_cast<double>(x);
    op.max = std::max(op.max, std::fabs(static_cast<double>(x)));
  }
  op.l2 = std::sqrt(squares);
  op.digest = TensorDigest(canonical.data(), canonical.size() * sizeof(T));
  if (options_.tensors && options_.tensors(name) && status_.ok()) {
    status_ = Keep(canonical.data(), &op);
  }
  seen_.push_back({key, std::move(op)});
}

void UpdateTracer::SeeState() {
  const ParameterMap& map = job_.map();
  for (const Component c : {Component::kParameter, Component::kM, Component::kV}) {
    for (int i = 0; i < map.shard_count(); ++i) {
      const int shard = map.first_shard() + i;
      const float* slab = job_.state().slab(i).slab(c).data();
      for (const Piece& piece : job_.layout().pieces(shard)) {
        See(fmt::format("state/{}#{}/shard{}", job_.layout().tensors()[piece.tensor].name,
                        ComponentName(c), shard),
            slab + piece.offset, piece.rows(), piece.cols());
      }
    }
  }
}

Result<Job::Step> UpdateTracer::Advance(Script* script) {
  seen_.clear();
  ops_.clear();
  memory_.clear();
  SeeState();
  job_.set_probe(this);
  Result<Job::Step> step = job_.Advance(script);
  job_.set_probe(nullptr);
  const Status gathered = Gather();
  RT_RETURN_IF_ERROR(step.status());
  RT_RETURN_IF_ERROR(gathered);
  return step;
}

// Everybody's list, one rank's after another's.
Result<std::vector<UpdateTracer::Seen>> UpdateTracer::GatherSeen() {
  RT_RETURN_IF_ERROR(AgreeOnStatus(job_.comm(), status_));
  std::string mine;
  for (const Seen& seen : seen_) mine += SeenText(seen.key, seen.op);
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> lists,
                      GatherTexts(job_.comm(), job_.comm().World(), mine));
  std::vector<Seen> all;
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    std::istringstream words(lists[rank]);
    Seen seen;
    std::string hex;
    bool fp64 = false;
    uint64_t l2 = 0, max = 0;
    Key& key = seen.key;
    TracedOp& op = seen.op;
    while (words >> key[0] >> key[1] >> key[2] >> key[3] >> key[4] >> op.name >> fp64 >> op.rows >>
           op.cols >> hex >> l2 >> max >> op.kept >> op.offset) {
      op.type = fp64 ? TensorType::kF64 : TensorType::kF32;
      RT_ASSIGN_OR_RETURN(op.digest, ParseDigest(hex));
      op.l2 = std::bit_cast<double>(l2);
      op.max = std::bit_cast<double>(max);
      op.rank = static_cast<int>(rank);
      all.push_back(seen);
    }
    RT_CHECK(words.eof());
  }
  return all;
}

// Merged by key. A rank has a part of the list, but the one that has virtual shard 0 lacks nothing of
// its micro-batches: what stands first there is first everywhere.
Status UpdateTracer::Gather() {
  RT_ASSIGN_OR_RETURN(std::vector<Seen> all, GatherSeen());
  std::map<std::pair<Key, std::string>, int64_t> places;
  for (Seen& seen : all) {
    Key section = seen.key;
    section[4] = 0;
    std::string whole = seen.op.name;
    TakeShard(&whole);
    const bool counts = seen.op.rank % job_.place().tp == 0;
    const auto place = std::pair(section, whole);
    if (counts) places.emplace(place, static_cast<int64_t>(places.size()));
    RT_CHECK(places.contains(place));
    seen.key[3] = places[place];
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Seen& a, const Seen& b) { return a.key < b.key; });
  const Seen* first = nullptr;
  for (Seen& seen : all) {
    if (first == nullptr || first->key != seen.key) {
      first = &seen;
    } else if (first->op.digest == seen.op.digest) {
      continue;
    } else {
      seen.op.name += fmt::format("@rank{}", seen.op.rank);
    }
    ops_.push_back(seen.op);
  }
  return {};
}

Result<std::string> UpdateTracer::Elements(const TracedOp& op) {
  RT_CHECK(op.kept);
  Result<std::string> mine = std::string();
  if (op.rank == job_.comm().rank()) {
    if (options_.spill_dir.empty()) mine = memory_.substr(op.offset, op.size_bytes());
    else mine = spill_->Read(op.offset, op.size_bytes());
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(job_.comm(), mine.status()));
  if (job_.comm().size() == 1) return mine;
  RT_ASSIGN_OR_RETURN(std::vector<std::string> all,
                      GatherTexts(job_.comm(), job_.comm().World(), *mine));
  return std::move(all[op.rank]);
}

}  // namespace retrace
