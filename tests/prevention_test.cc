// What a spike is, when an ensemble has decided, and where the point of no return lies.
#include "surgery/prevention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "surgery/no_return.h"
#include "tests/spiking_run.h"

namespace retrace {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- Predicates ----

std::vector<UpdateRecord> RecordsWith(const std::vector<double>& losses) {
  std::vector<UpdateRecord> records;
  for (const double loss : losses) {
    UpdateRecord record;
    record.update = std::ssize(records) + 1;
    record.loss = loss;
    record.gradient_norm = 10 * loss;
    records.push_back(record);
  }
  return records;
}

std::optional<int64_t> SpikeOf(const std::string& predicate, const std::vector<double>& losses) {
  const Result<SpikePredicate> parsed = SpikePredicate::Parse(predicate);
  EXPECT_TRUE(parsed.ok()) << parsed.status().message();
  return parsed.ok() ? parsed->FirstSpike(RecordsWith(losses)) : std::nullopt;
}

TEST(Predicate, AJumpIsARiseAboveTheLeastLossBefore) {
  EXPECT_EQ(4, SpikeOf("jump > 0.5", {9, 8, 8.25, 8.75, 7}));
  EXPECT_EQ(3, SpikeOf("jump>=0.25", {9, 8, 8.25, 8.75, 7}));
  EXPECT_EQ(std::nullopt, SpikeOf("jump > 0.75", {9, 8, 8.25, 8.75, 7}));
  EXPECT_EQ(std::nullopt, SpikeOf("jump > 0.1", {9, 8, 7}));
}

TEST(Predicate, APeakIsTheLossItself) {
  EXPECT_EQ(1, SpikeOf("peak > 8.5", {9, 8, 8.25}));
  EXPECT_EQ(std::nullopt, SpikeOf("peak > 9", {9, 8, 8.25}));
}

TEST(Predicate, TheEvaluationLossIsWatchedWhereThereIsOne) {
  std::vector<UpdateRecord> records = RecordsWith({9, 8, 7});
  for (UpdateRecord& record : records) record.evaluation_loss = 5 + record.update;
  EXPECT_EQ(2, SpikePredicate::Parse("jump > 0.5")->FirstSpike(records));
  EXPECT_EQ(3, SpikePredicate::Parse("loss < 7.5")->FirstSpike(records));
  EXPECT_EQ(2, SpikePredicate::Parse("evaluation_loss > 6")->FirstSpike(records));
}

TEST(Predicate, WhatIsNotFiniteIsASpikeOfEveryKind) {
  const double nan = std::nan("");
  for (const char* predicate : {"jump > 0.5", "peak > 100", "loss > 1e9", "non-finite",
                                "gradient_norm > 1e9"}) {
    EXPECT_EQ(3, SpikeOf(predicate, {9, 8, nan})) << predicate;
    EXPECT_EQ(3, SpikeOf(predicate, {9, 8, kInfinity})) << predicate;
    EXPECT_EQ(1, SpikeOf(predicate, {nan, 8, 8})) << predicate;
    std::vector<UpdateRecord> halted = RecordsWith({9, 8});
    halted.push_back(HaltedRecord(3, false));
    EXPECT_EQ(3, SpikePredicate::Parse(predicate)->FirstSpike(halted)) << predicate;
  }
  EXPECT_EQ(std::nullopt, SpikeOf("non-finite", {9, 8, 7}));
}

TEST(Predicate, ExpressionsBindAsInArithmetic) {
  const std::map<std::string, bool> holds = {
      {"1 + 2 * 3 == 7", true},
      {"(1 + 2) * 3 == 9", true},
      {"8 / 2 / 2 == 2", true},
      {"5 - 2 - 1 == 2", true},
      {"-2 * -3 == 6", true},
      {"not 1 > 2 and 2 > 1", true},
      {"1 > 2 and 1 > 2 or 2 > 1", true},
      {"1 > 2 and (1 > 2 or 2 > 1)", false},
      {"!(1 != 1) && 1e3 >= 1000", true},
      {"1 > 2 || 2 <= 1", false},
      {"gradient_norm > 50 and loss < 8.5 and update == 2", true},
      {"gradient_norm / loss > 9.5", true},
      {"loss > 13", false}};
  for (const auto& [text, expected] : holds) {
    EXPECT_EQ(expected, SpikeOf(text, {9, 8, 7}).has_value()) << text;
  }
}

TEST(Predicate, WrongWordsAreRefusedWithTheColumnAndTheNearestName) {
  const std::map<std::string, std::string> refused = {
      {"gradient_nrm > 100", "column 1: there is no field 'gradient_nrm'; the nearest is "
                             "'gradient_norm'"},
      {"loss > 1 and eval > 2", "column 14: there is no field 'eval'"},
      {"loss", "expected a comparison"},
      {"loss + 1", "expected a comparison"},
      {"loss > 1 > 2", "column 10: expected and, or"},
      {"(loss > 1", "expected ')', got the end"},
      {"loss > ", "column 8: expected a number or a field, got the end"},
      {"", "expected a number or a field, got the end"},
      {"loss > 1 and 2", "column 14: expected a comparison"},
      {"(loss > 1) + 2 > 3", "column 1: expected a number, got a comparison"},
      {"not loss", "expected a comparison"},
      {"loss > 1x", "expected a number"},
      {"loss > 1e999", "expected a number"},
      {"loss = 1", "column 6"},
      {std::string(1000, '(') + "1", "nested too deeply"},
      {"loss > ü", "expected a number or a field"}};
  for (const auto& [text, message] : refused) {
    const Result<SpikePredicate> parsed = SpikePredicate::Parse(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(StatusCode::kUsage, parsed.status().code());
    EXPECT_NE(std::string::npos, parsed.status().message().find(message))
        << text << ": " << parsed.status().message();
  }
}

TEST(Predicate, FieldsThatTheRecordsLackAreRefused) {
  const UpdateRecord record = RecordsWith({9})[0];
  EXPECT_TRUE(SpikePredicate::Parse("jump > 1")->Check(record).ok());
  EXPECT_FALSE(SpikePredicate::Parse("evaluation_loss > 1")->Check(record).ok());
  EXPECT_FALSE(SpikePredicate::Parse("not update_rms < 1")->Check(record).ok());
}

// ---- The sequential rule ----

// The probability of each answer where each replica shows no spike with probability p.
std::map<Prevents, double> AnswersAt(double p, const SequentialRule& rule) {
  std::map<Prevents, double> answers;
  std::map<int64_t, double> at = {{0, 1.0}};  // number without a spike -> probability
  for (int64_t n = 1; n <= rule.most; ++n) {
    std::map<int64_t, double> next;
    for (const auto& [without, chance] : at) {
      for (const int64_t add : {0, 1}) {
        const double here = chance * (add == 1 ? p : 1 - p);
        const std::optional<Prevents> answer = DecideSequentially(without + add, n, rule);
        (answer ? answers[*answer] : next[without + add]) += here;
      }
    }
    at = next;
  }
  EXPECT_TRUE(at.empty());
  return answers;
}

TEST(SequentialRule, WrongAnswersAreRareWhateverTheNumberOfReplicas) {
  for (const int64_t most : {6, 8, 12, 24, 64}) {
    const SequentialRule rule = {.least = 6, .most = most};
    // Wald's bound for a test without an end: 5/95.
    EXPECT_LT(AnswersAt(kPreventedShare, rule)[Prevents::kNo], 0.0527) << most;
    EXPECT_LT(AnswersAt(kNotPreventedShare, rule)[Prevents::kYes], 0.0527) << most;
    EXPECT_NEAR(1, AnswersAt(1, rule)[Prevents::kYes], 1e-12);
    EXPECT_NEAR(1, AnswersAt(0, rule)[Prevents::kNo], 1e-12);
  }
}

TEST(SequentialRule, ItStopsWhenNothingCanChangeTheAnswer) {
  const SequentialRule six = {.least = 6, .most = 6};
  EXPECT_EQ(std::nullopt, DecideSequentially(4, 4, six));
  EXPECT_EQ(Prevents::kYes, DecideSequentially(5, 5, six)) << "5 of 6 at the least";
  EXPECT_EQ(std::nullopt, DecideSequentially(0, 3, six)) << "3 of 6 would be undecided";
  EXPECT_EQ(Prevents::kNo, DecideSequentially(0, 4, six));
  EXPECT_EQ(Prevents::kUndecided, DecideSequentially(3, 5, six)) << "3 or 4 of 6";
  EXPECT_EQ(Prevents::kUndecided, DecideSequentially(3, 6, six));
  const SequentialRule twelve;
  EXPECT_EQ(std::nullopt, DecideSequentially(5, 5, twelve)) << "six at the least";
  EXPECT_EQ(Prevents::kYes, DecideSequentially(6, 6, twelve));
  EXPECT_EQ(std::nullopt, DecideSequentially(5, 6, twelve));
  EXPECT_EQ(Prevents::kYes, DecideSequentially(6, 7, twelve));
  EXPECT_EQ(Prevents::kNo, DecideSequentially(0, 6, twelve));
  EXPECT_EQ(Prevents::kNo, DecideSequentially(4, 12, twelve));
  EXPECT_EQ(Prevents::kUndecided, DecideSequentially(5, 12, twelve));
  EXPECT_EQ(Prevents::kUndecided, DecideSequentially(9, 12, twelve));
}

// ---- Searches ----

class Searches : public SpikingRuns {
 protected:
  static void SetUpTestSuite() {
    SpikingRuns::SetUpTestSuite();
    // Update 4 goes 300 times too far, so that the loss is high from record 5 on.
    MakeRun("planted", 1, {"lr:scale=300@4"});
  }

  PreventionOptions Options(const std::string& predicate) const {
    return OptionsFrom(1, predicate);
  }
  struct Found {
    NoReturn answer;
    int64_t lived = 0, replicas_found = 0;
  };
  Found Search(const std::string& run_name, const std::string& intervention,
               const PreventionOptions& options, NoReturnOptions more = {}) {
    const RunReader run = RunReader::Open(*runs_ / run_name).value();
    const auto trials = PreventionTrials::Make(run, options);
    EXPECT_TRUE(trials.ok()) << trials.status().message();
    EXPECT_FALSE((*trials)->Prove()->has_value());
    const Result<NoReturn> answer =
        FindNoReturn(**trials, {ParseIntervention(intervention).value()}, more);
    EXPECT_TRUE(answer.ok()) << answer.status().message();
    return {answer.ok() ? *answer : NoReturn(), (*trials)->updates_lived(),
            (*trials)->replicas_found()};
  }
};

// Counted as a spike at record 7 only, so that updates 5 and 6 lie behind the point of no return.
constexpr char kLate[] = "jump > 1 and update >= 7";

TEST_F(Searches, ThePlantedPointOfNoReturnIsFound) {
  const Found found = Search("planted", "lr:scale=0.0033333333", Options(kLate));
  EXPECT_EQ(7, found.answer.spike);
  EXPECT_TRUE(found.answer.complete);
  EXPECT_TRUE(found.answer.Decided());
  EXPECT_EQ(4, found.answer.last_prevented);
  EXPECT_EQ(5, found.answer.first_not);
  EXPECT_TRUE(found.answer.violations.empty());
  EXPECT_GE(found.answer.probes.size(), 5u) << "points on both sides are probed";
  for (const auto& [update, prevention] : found.answer.probes) {
    EXPECT_EQ(0, prevention.control_without) << "without it, every replica spikes";
    EXPECT_EQ(update <= 4 ? Prevents::kYes : Prevents::kNo, prevention.answer) << update;
  }
}

TEST_F(Searches, AnOrderThatDoesNotHoldIsReported) {
  // The healthy state behind the planted update: it heals from update 5 on, and not before.
  const std::string graft = "graft:from=" + *runs_ / "calm" + ",at=4,what=p+m+v";
  const Found found = Search("planted", graft, Options(kLate));
  EXPECT_EQ(Prevents::kNo, found.answer.probes.at(1).answer);
  EXPECT_EQ(std::nullopt, found.answer.last_prevented);
  ASSERT_FALSE(found.answer.violations.empty());
  for (const int64_t update : found.answer.violations) EXPECT_GE(update, 5);
}

TEST_F(Searches, AnEndedSearchGoesOnWhereItWas) {
  PreventionOptions options = Options(kLate);
  const Found whole = Search("planted", "lr:scale=0.0033333333", options);
  options.out = out_ / "again";
  options.budget = whole.lived / 2;
  const Found half = Search("planted", "lr:scale=0.0033333333", options);
  EXPECT_FALSE(half.answer.complete);
  EXPECT_LE(half.lived, options.budget);
  EXPECT_FALSE(half.answer.probes.empty());
  options.budget = 0;
  const Found rest = Search("planted", "lr:scale=0.0033333333", options);
  EXPECT_TRUE(rest.answer.complete);
  EXPECT_EQ(whole.lived, half.lived + rest.lived) << "nothing is lived twice";
  EXPECT_EQ(whole.answer.last_prevented, rest.answer.last_prevented);
  const Found nothing = Search("planted", "lr:scale=0.0033333333", options);
  EXPECT_EQ(0, nothing.lived);
}

TEST_F(Searches, JobsSideBySideGiveTheSameAnswers) {
  PreventionOptions options = Options(kLate);
  const Found one = Search("planted", "lr:scale=0.0033333333", options);
  options.out = out_ / "jobs";
  options.jobs = 4;
  const Found four = Search("planted", "lr:scale=0.0033333333", options);
  ASSERT_EQ(one.answer.probes.size(), four.answer.probes.size());
  for (const auto& [update, prevention] : one.answer.probes) {
    EXPECT_EQ(prevention.without, four.answer.probes.at(update).without);
    EXPECT_EQ(prevention.replicas, four.answer.probes.at(update).replicas);
  }
}

TEST_F(Searches, TheLadderIsClimbedAndItsEndIsSaid) {
  PreventionOptions options = Options("jump > 1");
  options.sigma.reset();
  const RunReader run = RunReader::Open(*runs_ / "planted").value();
  const auto trials = PreventionTrials::Make(run, options).value();
  const Prevention late =
      **trials->Decide(4, {ParseIntervention("lr:scale=0.0033333333").value()});
  EXPECT_EQ(Prevents::kYes, late.answer);
  EXPECT_TRUE(late.laddered);
  EXPECT_FALSE(late.saturated) << "one update before the jump, noise has not grown";
  EXPECT_EQ(0x1p-10, late.sigma);
}

TEST_F(Searches, AReplicaThatHaltsHasSpiked) {
  const RunReader run = RunReader::Open(*runs_ / "planted").value();
  const auto trials = PreventionTrials::Make(run, Options("peak > 1e30")).value();
  const Prevention halts = **trials->Decide(2, {ParseIntervention("lr:constant=1e30").value()});
  EXPECT_EQ(Prevents::kNo, halts.answer);
  EXPECT_EQ(0, halts.without);
  EXPECT_EQ(6, halts.control_without) << "the planted jump is no such peak";
  const Prevention calm = **trials->Decide(2, {ParseIntervention("lr:constant=0").value()});
  EXPECT_EQ(Prevents::kYes, calm.answer);
}

TEST_F(Searches, WithoutASpikeThereIsNothingToSearch) {
  const RunReader run = RunReader::Open(*runs_ / "calm").value();
  const auto trials = PreventionTrials::Make(run, Options("jump > 100")).value();
  const Result<NoReturn> none =
      FindNoReturn(*trials, {ParseIntervention("clip:none").value()}, {});
  ASSERT_FALSE(none.ok());
  EXPECT_NE(std::string::npos, none.status().message().find("no spike"));
  const auto at_once = PreventionTrials::Make(
      run, [&] {
        PreventionOptions options = Options("loss > 0");
        options.out = out_ / "other";
        return options;
      }());
  EXPECT_FALSE(FindNoReturn(**at_once, {}, {}).ok()) << "nothing lies before the first update";
}

}  // namespace
}  // namespace retrace
