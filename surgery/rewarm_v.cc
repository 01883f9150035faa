// rewarm-v: Adam's v from the gradient that the coming update has.
#include "core/scalar_math.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Check(const Arguments& arguments) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "how", {"square", "max"}));
  return ChoiceArgument(arguments, "gradient", {"clipped", "raw"});
}

// FP32, each operation rounded; the clip factor is that of the tensor, or of the row where the clip
// is per row.
void Rewarm(const Piece& piece, const std::vector<float>& row_clips, float clip, bool keeps_larger,
            const float* gradient, float* v) {
  for (int64_t i = 0; i < piece.numel(); ++i) {
    const float factor = row_clips.empty() ? clip : row_clips[piece.row_first + i / piece.cols()];
    const float g = factor * gradient[i], square = g * g;
    if (keeps_larger && !(v[i] < square)) continue;  // a NaN gradient changes nothing
    v[i] = square == square ? square : math::CanonicalNan(square);
  }
}

Status Edit(const Arguments& arguments, Job& job) {
  const std::string& only = arguments.at("only");
  const bool raw = arguments.at("gradient") == "raw", larger = arguments.at("how") == "max";
  RT_RETURN_IF_ERROR(CheckGlob(job.layout(), only));
  RT_ASSIGN_OR_RETURN(const Clips clips, job.NextGradient());
  for (int i = 0; i < job.map().shard_count(); ++i) {
    for (const Piece& piece : job.layout().pieces(job.map().first_shard() + i)) {
      const int t = piece.tensor;
      if (!GlobMatches(only, job.layout().tensors()[t].name)) continue;
      Rewarm(piece, raw || clips.rows.empty() ? std::vector<float>() : clips.rows[t],
             raw ? 1.0f : clips.tensors[t], larger, job.updater().gradient(i).data() + piece.offset,
             job.state().slab(i).slab(Component::kV).data() + piece.offset);
    }
  }
  return {};
}

}  // namespace

const InterventionKind kRewarmV = {
    .name = "rewarm-v",
    .summary = "Set Adam's v from the gradient of the coming update; t stays",
    .touches = "state: v",
    .formula = "v = g^2, or max(v, g^2); g of update k at this state",
    .example = "rewarm-v:max,gradient=clipped@6",
    .reference =
        "Ma and Yarats 2021, arXiv 1910.04209 (Adam's warm-up); Molybog et al. 2023, arXiv "
        "2304.09871",
    .parameters = {{"how", "square: v = g^2; max: the larger of v and g^2", ""},
                   {"gradient", "clipped, as the update will have it, or raw", ""},
                   {"only", "glob over tensor names", "*"}},
    .check = Check,
    .edit_state = Edit};

}  // namespace retrace
