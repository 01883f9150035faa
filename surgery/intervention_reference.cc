// docs/interventions.md, from the registry.
#include <string>

#include "surgery/intervention.h"

namespace retrace {
namespace {

constexpr const char* kIntroduction =
    R"(# Interventions

<!-- Generated from the registry of surgery/ by InterventionReference(); tests/interventions_test.cc says how. -->

What `retrace replay RUN --do ...` and experiments can change. The text of one is
`NAME[:KEY=VALUE,...][@k[..l]]`; a value without a key is the first parameter's.

- `@k` names update k. A change of the *state* edits `RUN@(k-1)` just before update k. A change of the
  *recipe*, or of an *update* itself, is in force during updates k..l, `@k` alone: during update k.
  Without a date k is the first replayed update, and all but changes of the state stay in force.
- `only=GLOB` takes tensors by name: `*` stands for any run of characters, `?` for one.
- Several compose in the order in which they are given. A branch's lineage keeps them in canonical form,
  every parameter named, but those that leave things as the recipe has them.
- `--dry-run` shows what each would change, tensor by tensor with norms before and after, and runs nothing.
- Where a verb could mean several things, the meaning is a required parameter.
)";

std::string Cell(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) {
    text.insert(at, "\\");
  }
  return text;
}

std::string SectionOf(const InterventionKind& kind) {
  std::string text = "\n## " + kind.name + "\n\n" + kind.summary + ".\n\n";
  if (!kind.parameters.empty()) {
    text += "| parameter | meaning | default |\n| --- | --- | --- |\n";
    for (const Parameter& parameter : kind.parameters) {
      text +=
          "| `" + parameter.name + "` | " + Cell(parameter.meaning) + " | " +
          (parameter.default_value.empty() ? "*required*" : "`" + parameter.default_value + "`") +
          " |\n";
    }
    text += "\n";
  }
  text += "- touches " + kind.touches + "\n";
  text += "- formula: `" + kind.formula + "`\n";
  text += "- example: `--do '" + kind.example + "'`\n";
  return text + "- from: " + kind.reference + "\n";
}

}  // namespace

std::string InterventionReference() {
  std::string text = kIntroduction;
  for (const InterventionKind* kind : InterventionKinds()) text += SectionOf(*kind);
  return text;
}

}  // namespace retrace
