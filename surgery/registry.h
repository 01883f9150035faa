// The registry of interventions: one kind, one file, one line here. Used by intervention.cc.
#ifndef RETRACE_SURGERY_REGISTRY_H_
#define RETRACE_SURGERY_REGISTRY_H_

#include <vector>

#include "surgery/intervention.h"

namespace retrace {

extern const InterventionKind kClip;
extern const InterventionKind kInit;
extern const InterventionKind kLr;
extern const InterventionKind kPerturb;
extern const InterventionKind kPrecision;
extern const InterventionKind kResetMoments;

inline std::vector<const InterventionKind*> RegisteredKinds() {
  return {&kClip, &kInit, &kLr, &kPerturb, &kPrecision, &kResetMoments};
}

}  // namespace retrace

#endif  // RETRACE_SURGERY_REGISTRY_H_
