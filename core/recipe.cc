#include "core/recipe.h"

namespace retrace {

std::vector<LayerKind> LayerPattern(int64_t layers, int64_t full_every, bool last_full) {
  std::vector<LayerKind> types(layers, LayerKind::kSliding);
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (full_every > 0 && (layer + 1) % full_every == 0) types[layer] = LayerKind::kFull;
  }
  if (last_full && layers > 0) types[layers - 1] = LayerKind::kFull;
  return types;
}

}  // namespace retrace
