// untie: a head of its own, with the values of the embedding.
#include <algorithm>

#include "surgery/registry.h"

namespace retrace {
namespace {

Status Remake(const Arguments&, Recipe* recipe) {
  if (!recipe->model.tie_word_embeddings) return UsageError("the head is untied already");
  recipe->model.tie_word_embeddings = false;
  return {};
}

Status Check(const Arguments& arguments) {
  return ChoiceArgument(arguments, "moments", {"copy", "zero"});
}

Status Edit(const Arguments& arguments, Job& job) {
  const bool moments = arguments.at("moments") == "copy";
  const Layout& layout = job.layout();
  const int head = layout.Find("lm_head.weight"), table = layout.Find("model.embed_tokens.weight");
  RT_CHECK(head >= 0 && table >= 0);
  for (int i = 0; i < job.map().shard_count(); ++i) {
    const int shard = job.map().first_shard() + i;
    const Piece &to = *layout.FindPiece(shard, head), &from = *layout.FindPiece(shard, table);
    for (const Component c : {Component::kParameter, Component::kM, Component::kV}) {
      if (c != Component::kParameter && !moments) continue;
      float* slab = job.state().slab(i).slab(c).data();
      std::copy_n(slab + from.offset, from.numel(), slab + to.offset);
    }
  }
  std::vector<int64_t>& t = job.state().state.counters.adam_t;
  t[head] = moments ? t[table] : 0;
  return {};
}

}  // namespace

const InterventionKind kUntie = {
    .name = "untie",
    .summary = "Give the head a tensor of its own, lm_head.weight, with the embedding's values",
    .touches = "state: lm_head.weight; recipe: model.tie_word_embeddings",
    .formula = "lm_head.weight = model.embed_tokens.weight",
    .example = "untie:moments=copy",
    .reference = "Press and Wolf 2017, arXiv 1608.05859 (tied embeddings)",
    .parameters = {{"moments", "of the new tensor: copy (m, v and t as the embedding's) or zero",
                    ""}},
    .check = Check,
    .edit_state = Edit,
    .remake = Remake};

}  // namespace retrace
