// Exchanges between ranks that are not part of the arithmetic: texts, replicas, digests.
// Used by the job and the recorder. Every rank of the group calls them in step.
#ifndef RETRACE_REPLAY_EXCHANGE_H_
#define RETRACE_REPLAY_EXCHANGE_H_

#include <string>
#include <vector>

#include "replay/comm.h"
#include "replay/rank_place.h"
#include "replay/rank_state.h"
#include "replay/step_pass.h"

namespace retrace {

// Everybody's text, by member of the group.
Result<std::vector<std::string>> GatherTexts(Comm& comm, const RankGroup& group,
                                             const std::string& mine);

// Every rank succeeds, or every rank gets the status of the first that did not. Call it where one
// rank may fail alone (a file, a dataset), before the next collective call.
Status AgreeOnStatus(Comm& comm, const Status& mine);

// Fills the replica slabs from their owners (after a state was read or edited).
Status ShareReplicas(RankContext context, const ParameterMap& map, RankState* state);

// The digest of the whole state, on all ranks. Errors: kFailed where a replica, or another
// data-parallel rank's copy, differs; the message names the rank and the tensor.
Result<Digest> DigestAcrossRanks(RankContext context, const ParameterMap& map,
                                 const RankState& state);

}  // namespace retrace

#endif  // RETRACE_REPLAY_EXCHANGE_H_
