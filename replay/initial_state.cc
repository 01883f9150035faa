#include "replay/initial_state.h"

#include <algorithm>

#include "core/philox.h"
#include "core/random_streams.h"

namespace retrace {
namespace {

bool EndsWith(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

double InitialStd(const Recipe& recipe, const TensorSpec& spec) {
  if (spec.layer < 0) return recipe.init.embedding_std;
  const bool output = EndsWith(spec.name, "o_proj.weight") || EndsWith(spec.name, "down_proj.weight");
  if (!output || recipe.init.scheme == InitScheme::kHf) return recipe.init.std;
  return recipe.init.std / math::Sqrt(2.0 * static_cast<double>(recipe.model.layers));
}

}  // namespace

void InitialPiece(const Recipe& recipe, const TensorSpec& spec, const Piece& piece, float* out) {
  if (spec.vector) {
    std::fill_n(out, piece.numel(), 1.0f);
    return;
  }
  const double std = InitialStd(recipe, spec);
  const RandomStream random =
      MakeRandomStream(recipe.init.seed, static_cast<uint32_t>(RandomPurpose::kInitialValue),
                       TensorStream(spec.name));
  const bool embedding = spec.name == "model.embed_tokens.weight";
  for (int64_t row = piece.row_first; row < piece.row_last; ++row) {
    const bool zero =
        embedding && recipe.init.zero_pad_row && row == recipe.model.pad_token_id;
    for (int64_t col = piece.col_first; col < piece.col_last; ++col) {
      const uint64_t element = static_cast<uint64_t>(row * spec.cols + col);
      *out++ = zero ? 0.0f : static_cast<float>(std * RandomNormal(random, element));
    }
  }
}

RankState InitialState(const Recipe& recipe, const ParameterMap& map, Engine& engine) {
  RankState rank = MakeRankState(map);
  const Layout& layout = map.layout();
  std::vector<std::pair<Piece, ShardState*>> work;
  for (int i = 0; i < map.shard_count(); ++i) {
    for (const Piece& piece : layout.pieces(map.first_shard() + i)) {
      work.emplace_back(piece, &rank.slab(i));
    }
  }
  for (const ParameterMap::Replica& replica : map.replicas()) {
    work.emplace_back(replica.piece, &rank.replicas);
  }
  engine.pool().Run(static_cast<int64_t>(work.size()), [&](int64_t i, int) {
    const auto& [piece, slab] = work[i];
    InitialPiece(recipe, layout.tensors()[piece.tensor], piece,
                 slab->slab(Component::kParameter).data() + piece.offset);
  });
  return rank;
}

}  // namespace retrace
