// What a policy keeps, and that it never gives up the only way back to a state that it keeps.
#include "replay/retention.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace retrace {
namespace {

// "k..j..": a keyframe, a journal, no files; positions from 0.
KeptSteps Steps(const std::string& text) {
  KeptSteps steps;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '.') continue;
    steps[static_cast<int64_t>(i)] = {text[i] != 'j', text[i] != 'k', 1};  // 'b': both
  }
  return steps;
}

// Positions whose state follows from the steps.
std::set<int64_t> Reachable(const KeptSteps& steps) {
  std::set<int64_t> reachable;
  for (const auto& [position, step] : steps) {
    if (step.keyframe || (step.journal && reachable.contains(position - 1))) {
      reachable.insert(position);
    }
  }
  return reachable;
}

std::vector<PositionRange> Without(const std::string& steps, std::set<int64_t> wanted) {
  return Superfluous(Steps(steps), [&](int64_t k) { return wanted.contains(k); });
}

TEST(Superfluous, IsWhatLeadsToNoWantedState) {
  using Ranges = std::vector<PositionRange>;
  EXPECT_EQ((Ranges{{4, 5}}), Without("kjjjjj", {3}));
  EXPECT_EQ((Ranges{}), Without("kjjjjj", {5}));
  EXPECT_EQ((Ranges{{0, 3}}), Without("kjjjkjj", {6}));
  EXPECT_EQ((Ranges{{0, 2}, {5, 6}}), Without("k.jk.jj", {3}));
  EXPECT_EQ((Ranges{{0, 1}}), Without("kjbj", {3}));  // a keyframe ends the way back
  EXPECT_EQ((Ranges{{1, 1}, {3, 3}}), Without("kjkjk", {0, 2, 4}));
  EXPECT_EQ((Ranges{{0, 0}}), Without("k.jj", {3}));  // no way back: its journals stay
}

TEST(Superfluous, NeverCutsTheWayBackAndLeavesNothingNeedless) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 2000; ++trial) {
    std::string text;
    std::set<int64_t> wanted;
    for (int64_t k = 0; k < 20; ++k) {
      text += ".kjjjb"[random() % 6];
      if (random() % 5 == 0) wanted.insert(k);
    }
    const KeptSteps before = Steps(text);
    KeptSteps after = before;
    for (const PositionRange& range :
         Superfluous(before, [&](int64_t k) { return wanted.contains(k); })) {
      after.erase(after.lower_bound(range.first), after.upper_bound(range.last));
    }
    const auto reachable_before = Reachable(before), reachable_after = Reachable(after);
    for (int64_t k : wanted) {
      EXPECT_EQ(reachable_before.contains(k), reachable_after.contains(k)) << text << " @" << k;
    }
    // Taking away one more step would lose a wanted state, or is a wanted step without a way back.
    for (const auto& [k, step] : after) {
      KeptSteps less = after;
      less.erase(k);
      bool lost = !reachable_after.contains(k);
      for (int64_t w : wanted) lost = lost || !Reachable(less).contains(w);
      EXPECT_TRUE(lost) << text << " keeps " << k << " for nothing";
    }
  }
}

// Runs the policy as the recorder does. -> the text of what is there after each position.
std::vector<std::string> Live(Retention* retention, int64_t last, int64_t journal_bytes = 1,
                              int64_t keyframe_bytes = 3) {
  std::vector<std::string> history;
  for (int64_t k = 0; k <= last; ++k) {
    const Keep keep = retention->Next(k);
    std::optional<KeptStep> step;
    if (keep == Keep::kKeyframe) step = {true, false, keyframe_bytes};
    if (keep == Keep::kJournal) step = {false, true, journal_bytes};
    retention->Reached(k, step);
    (void)retention->TakeSuperfluous();
    std::string text(last + 1, '.');
    for (const auto& [position, kept] : retention->steps()) {
      text[position] = kept.keyframe ? 'k' : 'j';
    }
    history.push_back(text);
  }
  return history;
}

TEST(Retention, WithoutARingNothingGoes) {
  StoreRecipe store;
  store.window_first = 2, store.window_last = 4, store.every = 6, store.keyframe_every = 2;
  Retention retention(store, 0);
  EXPECT_EQ("k.kjk.k.....k", Live(&retention, 12).back());
}

TEST(Retention, KeepLastKeepsTheLastStatesAndTheirWayBack) {
  StoreRecipe store;
  store.keep_last = 3, store.keyframe_every = 4;
  Retention retention(store, 0);
  const auto history = Live(&retention, 11);
  EXPECT_EQ("kjjjkj......", history[5]);  // 3, 4, 5
  EXPECT_EQ("k...kjj.....", history[6]);  // 4, 5, 6; the first state always stays
  EXPECT_EQ("k.......kjjj", history[11]);
}

TEST(Retention, PoliciesCombine) {
  StoreRecipe store;
  store.window_first = 1, store.window_last = 2, store.every = 5, store.keep_last = 2;
  store.keyframe_every = 4;
  Retention retention(store, 0);
  // 1: the window's keyframe; 5, 10: every fifth; 12: the ring's.
  EXPECT_EQ("kkj..k....k.kj", Live(&retention, 13).back());
}

TEST(Retention, TheFlightRecordersRingBeginsAtAKeyframe) {
  StoreRecipe store;
  store.flight.steps = 5, store.keyframe_every = 3;
  Retention retention(store, 0);
  const auto history = Live(&retention, 12);
  for (int64_t k = 0; k <= 12; ++k) {
    const auto reachable = Reachable(Steps(history[k]));
    for (int64_t p = std::max<int64_t>(0, k - 4); p <= k; ++p) EXPECT_TRUE(reachable.contains(p));
  }
  EXPECT_EQ("k.....kjjkjjk", history[12]);  // 8 .. 12, from keyframe 6
  EXPECT_EQ(6, retention.RingFirst());
}

TEST(Retention, HeldStatesStayWhenTheRingMovesOn) {
  StoreRecipe store;
  store.flight.steps = 2, store.keyframe_every = 3;
  Retention retention(store, 0);
  Live(&retention, 5);
  const int64_t first = retention.RingFirst();
  EXPECT_EQ(3, first);
  retention.Hold({first, 7});
  for (int64_t k = 6; k <= 14; ++k) {
    const bool keyframe = retention.Next(k) == Keep::kKeyframe;
    retention.Reached(k, KeptStep{keyframe, !keyframe, 1});
    (void)retention.TakeSuperfluous();
  }
  std::string text(15, '.');
  for (const auto& [k, step] : retention.steps()) text[k] = step.keyframe ? 'k' : 'j';
  EXPECT_EQ("k..kjjkj....kjj", text);
}

TEST(Retention, ABoundInBytesEndsSegmentsEarlyAndIsHeld) {
  StoreRecipe store;
  store.flight.steps = 100, store.flight.bytes = 20, store.keyframe_every = 50;
  Retention retention(store, 0);
  for (int64_t k = 0; k <= 60; ++k) {
    const bool keyframe = retention.Next(k) == Keep::kKeyframe;
    retention.Reached(k, KeptStep{keyframe, !keyframe, keyframe ? 3 : 1});
    (void)retention.TakeSuperfluous();
    int64_t bytes = 0;
    for (const auto& [position, step] : retention.steps()) bytes += position == 0 ? 0 : step.bytes;
    EXPECT_LE(bytes, 20) << k;
    if (k > 20) {
      EXPECT_GE(bytes, 8) << k;  // and it is used
    }
  }
}

TEST(Retention, ABoundTooSmallForOneSegmentStillKeepsAWayToTheNewestState) {
  StoreRecipe store;
  store.flight.steps = 10, store.flight.bytes = 1, store.keyframe_every = 4;
  Retention retention(store, 0);
  const auto history = Live(&retention, 9);
  for (int64_t k = 0; k <= 9; ++k) EXPECT_TRUE(Reachable(Steps(history[k])).contains(k));
}

}  // namespace
}  // namespace retrace
