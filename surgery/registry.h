// The registry of interventions: one kind, one file, one line here. Used by intervention.cc.
#ifndef RETRACE_SURGERY_REGISTRY_H_
#define RETRACE_SURGERY_REGISTRY_H_

#include <vector>

#include "surgery/intervention.h"

namespace retrace {

extern const InterventionKind kAttention;
extern const InterventionKind kAttnScale;
extern const InterventionKind kAverage;
extern const InterventionKind kBeta1;
extern const InterventionKind kBeta2;
extern const InterventionKind kBiasCorrection;
extern const InterventionKind kClip;
extern const InterventionKind kDropSamples;
extern const InterventionKind kEmbedScale;
extern const InterventionKind kEps;
extern const InterventionKind kFreeze;
extern const InterventionKind kGraft;
extern const InterventionKind kInit;
extern const InterventionKind kLayerScalar;
extern const InterventionKind kLr;
extern const InterventionKind kLrIndexing;
extern const InterventionKind kPadLookup;
extern const InterventionKind kPartials;
extern const InterventionKind kPerturb;
extern const InterventionKind kPostNorm;
extern const InterventionKind kPreNorm;
extern const InterventionKind kPrecision;
extern const InterventionKind kQkNorm;
extern const InterventionKind kQkNormGradient;
extern const InterventionKind kReorder;
extern const InterventionKind kRepeatBatch;
extern const InterventionKind kReplaceData;
extern const InterventionKind kResetMoments;
extern const InterventionKind kRewarmV;
extern const InterventionKind kScale;
extern const InterventionKind kScaleMoments;
extern const InterventionKind kSetCounter;
extern const InterventionKind kSkipBatch;
extern const InterventionKind kSkipUpdate;
extern const InterventionKind kSoftcap;
extern const InterventionKind kSwapBatch;
extern const InterventionKind kUntie;
extern const InterventionKind kUpdateClip;
extern const InterventionKind kVNorm;
extern const InterventionKind kVirtualShards;
extern const InterventionKind kWeightDecay;
extern const InterventionKind kWindow;
extern const InterventionKind kZLoss;

inline std::vector<const InterventionKind*> RegisteredKinds() {
  return {&kAttention, &kAttnScale, &kAverage, &kBeta1, &kBeta2, &kBiasCorrection, &kClip,
          &kDropSamples, &kEmbedScale, &kEps, &kFreeze, &kGraft, &kInit, &kLayerScalar, &kLr,
          &kLrIndexing, &kPadLookup, &kPartials, &kPerturb, &kPostNorm, &kPreNorm, &kPrecision,
          &kQkNorm, &kQkNormGradient, &kReorder, &kRepeatBatch, &kReplaceData, &kResetMoments,
          &kRewarmV, &kScale, &kScaleMoments, &kSetCounter, &kSkipBatch, &kSkipUpdate, &kSoftcap,
          &kSwapBatch, &kUntie, &kUpdateClip, &kVNorm, &kVirtualShards, &kWeightDecay, &kWindow,
          &kZLoss};
}

}  // namespace retrace

#endif  // RETRACE_SURGERY_REGISTRY_H_
