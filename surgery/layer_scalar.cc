// layer-scalar: the factor on a layer's output, of one layer, some or all.
#include <algorithm>
#include <charconv>
#include <string_view>

#include "surgery/registry.h"

namespace retrace {
namespace {

struct LayerRange {
  int64_t first = 0, last = 0;
};

// "3", "3..7", "all"
Result<LayerRange> LayersOf(const std::string& text) {
  constexpr int64_t kMost = 1 << 20;
  LayerRange range{0, kMost};
  if (text == "all") return range;
  const size_t dots = text.find("..");
  const std::string_view whole(text), parts[] = {
      whole.substr(0, dots), dots == std::string::npos ? whole : whole.substr(dots + 2)};
  int64_t* const values[] = {&range.first, &range.last};
  for (int i = 0; i < 2; ++i) {
    const char* const end = parts[i].data() + parts[i].size();
    const auto [stop, error] = std::from_chars(parts[i].data(), end, *values[i]);
    if (error == std::errc() && stop == end && *values[i] >= 0 && *values[i] < kMost) continue;
    return UsageError("layers: expected all, L or L..M with layers from 0, got '" + text + "'");
  }
  if (range.first <= range.last) return range;
  return UsageError("layers: expected L <= M in L..M, got '" + text + "'");
}

Status Check(const Arguments& arguments) {
  RT_RETURN_IF_ERROR(NumberArgumentIn(arguments, "value", -1e30, 1e30).status());
  return LayersOf(arguments.at("layers")).status();
}

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_ASSIGN_OR_RETURN(const double value, NumberArgumentIn(arguments, "value", -1e30, 1e30));
  RT_ASSIGN_OR_RETURN(LayerRange range, LayersOf(arguments.at("layers")));
  const int64_t layers = std::ssize(recipe->model.layer_scalar);
  if (arguments.at("layers") == "all") range.last = layers - 1;
  if (range.last >= layers) {
    return UsageError("layers: expected layers below " + std::to_string(layers) + ", got '" +
                      arguments.at("layers") + "'");
  }
  std::fill(recipe->model.layer_scalar.begin() + range.first,
            recipe->model.layer_scalar.begin() + range.last + 1, value);
  return {};
}

}  // namespace

const InterventionKind kLayerScalar = {
    .name = "layer-scalar",
    .summary = "Multiply the residual stream behind layers by another factor",
    .touches = "recipe: model.layer_scalar",
    .formula = "x = value * x",
    .example = "layer-scalar:0.9,layers=1..2",
    .reference = "Touvron et al. 2021, arXiv 2103.17239 (LayerScale); Gemma 4's layer_scalar",
    .parameters = {{"value", "the factor", ""},
                   {"layers", "all, L or L..M, counted from 0", "all"}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
