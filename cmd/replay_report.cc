#include "cmd/replay_report.h"

#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/recipe_toml.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

Json JsonOf(const ReplayedUpdate& u) {
  return {{"update", u.update},
          {"identical", u.identical()},
          {"expected", u.expected.Hex()},
          {"got", u.got.Hex()},
          {"same_tokens", u.recorded.tokens == u.replayed.tokens}};
}

void PrintUpdate(const OutputFlags& output, const ReplayedUpdate& u) {
  if (u.identical()) {
    fmt::print("update {:>5}  {}  {}  loss {:.6f}\n", u.update,
               Tinted(output, Tint::kGreen, "identical"), u.got.Hex(), u.replayed.loss);
    return;
  }
  fmt::print("update {:>5}  {}\n", u.update, Tinted(output, Tint::kRed, "differs"));
  fmt::print("  state   expected {}\n          got      {}\n", u.expected.Hex(), u.got.Hex());
  fmt::print("  loss    expected {}\n          got      {}\n", u.recorded.loss, u.replayed.loss);
  fmt::print("  |g|     expected {}\n          got      {}\n", u.recorded.gradient_norm,
             u.replayed.gradient_norm);
  if (u.recorded.tokens != u.replayed.tokens) {
    fmt::print("  tokens  expected {}\n          got      {} (is it the same dataset?)\n",
               u.recorded.tokens.Hex(), u.replayed.tokens.Hex());
  }
}

}  // namespace

Result<ReplayProof> ProveReplay(const ResolvedJob& job, const OutputFlags& output,
                                const RunReader& run, const UpdateRange& range) {
  RT_ASSIGN_OR_RETURN(const Recipe recipe,
                      ParseRecipe(run.recipe_text(), run.dir() + "/" + kRecipeName));
  ReplayProof proof;
  Json updates = Json::array();
  const auto visit = [&](const ReplayedUpdate& u) {
    proof.same += u.identical() ? 1 : 0;
    if (output.json)
      updates.push_back(JsonOf(u));
    else
      PrintUpdate(output, u);
    std::fflush(stdout);
  };
  const auto note = [&](const std::string& line) {
    if (!output.quiet) SayError(line);
  };
  RT_RETURN_IF_ERROR(RunJob(job, note, [&](Comm& comm) -> Status {
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> rank, Job::Make(recipe, comm, job.options));
    const std::string expected = Expectation(RecordedMachine(run), rank->machine());
    if (rank->is_rank0() && !expected.empty()) note(run.dir() + ": " + expected);
    RT_ASSIGN_OR_RETURN(proof.identical,
                        ReplayAsRecorded(run, *rank, range.first, range.last, visit));
    return {};
  }));
  proof.updates = updates.dump();
  return proof;
}

}  // namespace retrace
