// Tensors that several ranks hold are compared at each digest, so at each save: a planted drift is
// found, and its rank and tensor are named.
#include "replay/exchange.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "replay/job.h"
#include "replay/local_ranks.h"
#include "tests/numerics_case.h"

namespace retrace {
namespace {

// Makes a job, has rank `culprit` change what it holds, and asks for the digest.
Status DigestAfter(int tp, int dp, int culprit, const std::function<void(Job&)>& change) {
  const Recipe recipe = TinyRecipe();
  return RunLocalRanks(tp * dp, {}, [&](Comm& comm) -> Status {
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job,
                        Job::Make(recipe, comm, {.tp = tp, .dp = dp, .threads = 1}));
    RT_RETURN_IF_ERROR(job->StartFresh());
    RT_RETURN_IF_ERROR(job->StateDigestNow().status());
    if (comm.rank() == culprit) change(*job);
    return job->StateDigestNow().status();
  });
}

void FlipLowestBit(float* value) {
  uint32_t bits = 0;
  std::memcpy(&bits, value, sizeof bits);
  bits ^= 1;
  std::memcpy(value, &bits, sizeof bits);
}

TEST(Replicas, ThatDriftedApartAreNamedInEveryComponent) {
  for (Component c : {Component::kParameter, Component::kM, Component::kV}) {
    const Status status = DigestAfter(2, 1, 1, [&](Job& job) {
      ASSERT_FALSE(job.map().replicas().empty());
      const Piece& piece = job.map().replicas().back().piece;
      FlipLowestBit(&job.state().replicas.slab(c)[piece.offset + piece.numel() - 1]);
    });
    EXPECT_EQ(StatusCode::kFailed, status.code());
    const std::string what = std::string("holds another ") + ComponentName(c) + " of model.";
    EXPECT_NE(std::string::npos, status.message().find("rank 1 " + what)) << status.message();
    EXPECT_NE(std::string::npos, status.message().find("replicas drifted apart"));
  }
}

TEST(DataParallelCopies, ThatDifferAreNamed) {
  const Status status = DigestAfter(1, 2, 1, [](Job& job) {
    FlipLowestBit(&job.state().slab(0).slab(Component::kParameter)[3]);
  });
  EXPECT_EQ(StatusCode::kFailed, status.code());
  EXPECT_NE(std::string::npos, status.message().find("data-parallel rank 1")) << status.message();
}

TEST(Replicas, ThatAreEqualPass) {
  EXPECT_TRUE(DigestAfter(2, 2, 0, [](Job&) {}).ok());
}

}  // namespace
}  // namespace retrace
