// DeviceChain: the digests and records of a tiny recipe's updates, however and wherever they are
// computed. Used by device_update_test.cc (emulated kernels) and gpu_update_test.cc (a GPU).
#ifndef RETRACE_TESTS_DEVICE_CHAIN_H_
#define RETRACE_TESTS_DEVICE_CHAIN_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/recipe_toml.h"
#include "replay/job.h"
#include "replay/local_ranks.h"
#include "tests/places.h"
#include "tests/test_data.h"

namespace retrace {

// The recipes of examples/tiny.toml on which a device has to agree: every policy with both
// attentions, and switches that take ops away or bring others in.
inline std::vector<std::vector<std::string>> DeviceRecipes() {
  std::vector<std::vector<std::string>> recipes;
  for (const char* precision : {"fp32", "bf16", "bf16-sensitive-fp32", "fp64"}) {
    for (const char* attention : {"materialised", "blockwise"}) {
      recipes.push_back({"precision.preset=" + std::string(precision),
                         "model.attention=" + std::string(attention)});
    }
  }
  recipes.push_back({"model.z_loss=0.01", "optimizer.update_clip=0.5", "model.ignore_window=true"});
  recipes.push_back({"model.qk_norm=false", "model.v_norm=false", "model.pre_norm=false"});
  recipes.push_back({"model.tie_word_embeddings=false", "execution.recompute_activations=true"});
  return recipes;
}

inline Result<Recipe> DeviceRecipe(std::vector<std::string> overrides) {
  overrides.push_back("data.path=" + TestData("dataset/tiny"));
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", overrides);
}

// RUN@0 .. RUN@updates. `afterwards` is called by each rank at its end.
inline Result<std::vector<std::string>> DeviceChain(
    const Recipe& recipe, const JobOptions& options, int updates,
    const std::function<Status()>& afterwards = [] { return Status(); }) {
  std::vector<std::string> chain;
  const Status status = RunLocalRanks(options.tp * options.dp, {}, [&](Comm& comm) -> Status {
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Make(recipe, comm, options));
    RT_RETURN_IF_ERROR(job->StartFresh());
    RT_ASSIGN_OR_RETURN(const Digest first, job->StateDigestNow());
    chain.push_back(first.Hex());
    for (int i = 0; i < updates; ++i) {
      RT_ASSIGN_OR_RETURN(const Job::Step step, job->Advance());
      chain.push_back(step.digest.Hex() + RecordJson(step.result.record));
    }
    return afterwards();
  });
  if (!status.ok()) return status;
  return chain;
}

}  // namespace retrace

#endif  // RETRACE_TESTS_DEVICE_CHAIN_H_
