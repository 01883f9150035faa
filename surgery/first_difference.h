// FirstDifference: where two runs part, down to the op and the element: the first position whose states
// (or records) differ, by the digests of the ledgers, then the update that led there, lived again on
// both sides with a tracer. Used by bisect.
//
// A side whose replay is not its own recording had a fault that replay has not, of the hardware as a
// rule: then what it recorded (record, journal, keyframe) is compared with its replay.
#ifndef RETRACE_SURGERY_FIRST_DIFFERENCE_H_
#define RETRACE_SURGERY_FIRST_DIFFERENCE_H_

#include <optional>
#include <string>
#include <vector>

#include "core/diff.h"
#include "core/recipe_toml.h"
#include "formats/run_dir.h"
#include "replay/job.h"
#include "replay/probe.h"

namespace retrace {

// The first position of first..last whose digests differ; nullopt: none. Both runs have all of them.
// Ledgers are in memory whole, so every digest is looked at: unlike in a search by halves, two chains
// that part and meet again are told from two that never part.
std::optional<int64_t> FirstOtherDigest(const RunHistory& a, const RunHistory& b, int64_t first,
                                        int64_t last);

// What the ledgers say.
struct PartingPoint {
  int64_t first = 0, last = 0;      // positions that both have
  std::optional<int64_t> position;  // the first whose states, or records, differ; nullopt: none
  bool states = true;               // do states differ there? else records alone
  bool at_first = false;            // they differ from the beginning: at `first`
  // The update that is lived again: the one that led to `position`, or begins there where it is first.
  int64_t update() const { return at_first ? *position + 1 : *position; }
};

// Errors: kUsage where the runs have no position in common; kUnsupported where they are of different
// V: their digests say nothing.
Result<PartingPoint> FindPartingPoint(const RunReader& a, const RunReader& b);

// An element that differs, and of what.
struct DifferingElement {
  std::string name;  // an op, or a tensor: "NAME#g", "NAME#m"
  int64_t cols = 1;
  ElementDifference element;
  int64_t differing = 0, elements = 0;  // of the op, or tensor

  std::string IndexText() const;  // "[3, 7]"
};

// What a recording has that its replay has not.
struct RecordedFault {
  std::string phase;                 // "forward", "backward", "optimizer", "evaluation"
  std::vector<std::string> tensors;  // whose gradients differ, by journal or else by their norms
  bool has_journal = false, has_keyframe = false;  // at the position
  std::optional<DifferingElement> element;         // a: recorded, b: replayed; of g, else of p, m, v
};

struct ReplayedSide {
  bool recorded = false;  // the run has this update
  bool same = false;      // and the replay is it, state and record
  std::optional<RecordedFault> fault;
};

struct FirstDifference {
  int64_t update = 0;
  std::vector<RecipeDifference> recipes;  // in force
  int64_t ops = 0;                        // compared
  std::optional<std::string> op;          // the first that differs between the replays
  std::string only_in;                    // "A", "B" where the other side has no such op
  std::optional<DifferingElement> element;
  ReplayedSide a, b;
};

struct DifferenceSide {
  const RunReader* run = nullptr;
  Probe* before = nullptr;  // sees each op first: tests plant faults with it
};

// Lives update `point.update()` of both. Collective; whole on rank 0.
Result<FirstDifference> LiveDifference(Comm& comm, const JobOptions& job, const DifferenceSide& a,
                                       const DifferenceSide& b, const PartingPoint& point);

// "forward", "backward", "optimizer", "evaluation", "state" of an op's name.
std::string PhaseOf(const std::string& op);

}  // namespace retrace

#endif  // RETRACE_SURGERY_FIRST_DIFFERENCE_H_
