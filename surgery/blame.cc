#include "surgery/blame.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "core/glob.h"
#include "replay/step_loss.h"
#include "surgery/branch.h"

namespace retrace {
namespace {

using Slabs = std::vector<std::vector<float>>;  // parameters, one slab a shard

Slabs ParametersOf(const RankState& state) {
  Slabs slabs;
  for (const ShardState& shard : state.state.shards) {
    slabs.push_back(shard.slab(Component::kParameter));
  }
  return slabs;
}

// Losses of tokens, in the order of the batch.
class TokenProbe : public Probe {
 public:
  void Op(const std::string& name, const float* data, int64_t rows, int64_t) override {
    Take(name, data, rows);
  }
  void Op(const std::string& name, const double* data, int64_t rows, int64_t) override {
    Take(name, data, rows);
  }
  std::vector<double> Finish() { return std::exchange(losses_, {}); }

 private:
  template <class T>
  void Take(const std::string& name, const T* data, int64_t rows) {
    if (name.ends_with("/loss")) losses_.insert(losses_.end(), data, data + rows);
  }
  std::vector<double> losses_;
};

// What an update was, and the record of the next where the run has it.
struct BlamedUpdate {
  Recipe recipe;  // in force
  UpdateRecord record;
  std::optional<UpdateRecord> next;
  bool next_comparable = false;  // no surgery lies between the update and the next
  Slabs before, after;
  UpdateCurvature curvature;  // its scalars
};

Result<UpdateRecord> RecordOf(const RunReader& run, int64_t update) {
  return ParseRecord(run.history().Find(update)->record);
}

// d'Pd, with v of RUN@k.
double PreconditionedSquare(const BlamedUpdate& blamed, const Job& job, const Counters& before,
                            const RankState& state) {
  const std::vector<TensorSpec>& tensors = job.layout().tensors();
  Clips clips;
  clips.tensors.assign(tensors.size(), 1.0f);
  const OptimizerBlock block =
      MakeOptimizerBlock(blamed.recipe, tensors, before, clips, {.lr = blamed.record.lr});
  const std::vector<double>& update_clips = blamed.record.tensor_update_clips;
  double sum = 0;
  for (size_t s = 0; s < blamed.before.size(); ++s) {
    const std::vector<float>& v = state.state.shards[s].slab(Component::kV);
    for (const Piece& piece : job.layout().pieces(static_cast<int>(s))) {
      const OptimizerRow& row = block.rows[piece.tensor];
      const double clip = update_clips.empty() ? 1 : update_clips[piece.tensor];
      for (int64_t i = piece.offset; i < piece.offset + piece.numel(); ++i) {
        const double d = static_cast<double>(blamed.after[s][i]) - blamed.before[s][i];
        const double divisor = std::sqrt(v[i] / row.bias_correction2) + row.eps;
        if (d != 0) sum += d * d * divisor / clip;
      }
    }
  }
  return sum;
}

Status CheckUpdate(const RunReader& run, int64_t update) {
  const RunHistory& history = run.history();
  if (update <= history.first_position() || update > history.last_position()) {
    return UsageError(history.last_position() <= history.first_position()
                          ? run.dir() + ": the run has no updates"
                          : fmt::format("{}@{}: the run has updates {}..{}", run.dir(), update,
                                        history.first_position() + 1, history.last_position()));
  }
  RT_ASSIGN_OR_RETURN(const UpdateRecord record, RecordOf(run, update));
  if (record.action == "applied") return {};
  return UsageError(fmt::format("{}: update {} was {}: it changed no parameter", run.dir(), update,
                                record.action));
}

// From the job's state just before the update to RUN@k: by the journal where it is kept, else by
// living the update.
Status GoAfter(const RunReader& run, Job& job, int64_t update, Script* script) {
  const Timeline timeline(run, job.layout(), job.engine());
  if (timeline.LastReachable(update) == update) return job.Seek(run, update);
  RT_ASSIGN_OR_RETURN(const Job::Step step, job.Advance(script));
  const Digest expected = run.history().Find(update)->digest;
  if (step.digest == expected) return {};
  return DamagedError(fmt::format("{}@{} is not kept, and replay parts from the recording: expected "
                                  "state {}, got {}",
                                  run.dir(), update, expected.Hex(), step.digest.Hex()));
}

Result<BlamedUpdate> ReadUpdate(const RunReader& run, Job& job, int64_t update) {
  RT_RETURN_IF_ERROR(CheckUpdate(run, update));
  BlamedUpdate blamed;
  RT_ASSIGN_OR_RETURN(blamed.record, RecordOf(run, update));
  RT_ASSIGN_OR_RETURN(InterventionScript script, RecordedScript(run));
  RT_ASSIGN_OR_RETURN(blamed.recipe, script.RecipeFor(update, job.recipe()));
  if (update < run.history().last_position()) {
    RT_ASSIGN_OR_RETURN(blamed.next, RecordOf(run, update + 1));
    blamed.next_comparable = true;
    for (const Intervention& one : script.interventions()) {
      if (*one.first == update + 1 || *one.last == update) blamed.next_comparable = false;
    }
  }
  RT_RETURN_IF_ERROR(GoBefore(run, job, update));
  // The first state of a branch is after surgery already.
  if (update - 1 > run.history().first_position()) RT_RETURN_IF_ERROR(job.Edit(&script).status());
  blamed.before = ParametersOf(job.state());
  const Counters counters = job.state().state.counters;
  RT_RETURN_IF_ERROR(GoAfter(run, job, update, &script));
  blamed.after = ParametersOf(job.state());
  blamed.curvature.preconditioned2 = PreconditionedSquare(blamed, job, counters, job.state());
  blamed.curvature.lr = blamed.record.lr;
  blamed.curvature.beta1 = blamed.recipe.optimizer.beta1;
  return blamed;
}

std::vector<int64_t> SamplesOf(const UpdateRecord& record) {
  return record.sample_list.empty() ? Consecutive(record.first_sample, record.samples)
                                    : record.sample_list;
}

// Losses of one batch at parameters between two states.
class LossAlong {
 public:
  // `blamed` outlives it.
  static Result<std::unique_ptr<LossAlong>> Make(const BlamedUpdate& blamed, Job& job,
                                                 BlameBatch on);

  // before + share * (after - before).
  Result<TokenLosses> AtShare(double share);
  // The tensors' parameters after, the others' before; or the other way round.
  Result<TokenLosses> AtTensors(const std::vector<bool>& tensors, bool after);

 private:
  LossAlong(const BlamedUpdate& blamed, Job& job)
      : blamed_(blamed), layout_(job.layout()), pass_(MakeStepPass(blamed.recipe, job.map(),
                                                                   job.context())) {
    pass_->set_probe(&probe_);
    at_.state.shards.resize(blamed.before.size());
    for (ShardState& shard : at_.state.shards) shard = {};
  }
  Result<TokenLosses> Here();
  std::vector<float>& slab(size_t s) { return at_.state.shards[s].slab(Component::kParameter); }

  const BlamedUpdate& blamed_;
  const Layout& layout_;
  TokenProbe probe_;
  std::unique_ptr<StepPass> pass_;
  std::vector<TokenBatch> batches_;  // micro-batches, or the evaluation batch
  bool evaluation_ = false;
  RankState at_;  // parameters only
};

Result<std::unique_ptr<LossAlong>> LossAlong::Make(const BlamedUpdate& blamed, Job& job,
                                                   BlameBatch on) {
  std::unique_ptr<LossAlong> losses(new LossAlong(blamed, job));
  const DataRecipe& data = blamed.recipe.data;
  const int64_t length = data.sequence_length;
  std::shared_ptr<const BatchSource> source = job.shared_batches();
  if (on == BlameBatch::kEvaluation) {
    if (data.evaluation_samples == 0) {
      return UsageError("the recipe has no evaluation batch (data.evaluation_samples = 0); choose "
                        "the batch of the update");
    }
    losses->evaluation_ = true;
    RT_ASSIGN_OR_RETURN(TokenBatch batch,
                        ReadBatch(*source, true, 0, data.evaluation_samples, length));
    losses->batches_.push_back(std::move(batch));
    return losses;
  }
  if (on == BlameBatch::kNext && !blamed.next) {
    return UsageError(fmt::format("update {} is the run's last: there is no next batch",
                                  blamed.record.update));
  }
  if (!SameDataset(data, job.recipe().data)) {
    RT_ASSIGN_OR_RETURN(source, OpenTrainingSource(blamed.recipe, source));
  }
  const std::vector<int64_t> samples =
      SamplesOf(on == BlameBatch::kNext ? *blamed.next : blamed.record);
  for (auto at = samples.begin(); at != samples.end(); at += data.micro_batch_size) {
    RT_ASSIGN_OR_RETURN(
        TokenBatch batch,
        ReadBatch(*source, false, std::vector<int64_t>(at, at + data.micro_batch_size), length));
    losses->batches_.push_back(std::move(batch));
  }
  return losses;
}

Result<TokenLosses> LossAlong::Here() {
  TokenLosses losses;
  losses.length = batches_.front().length;
  std::vector<double> sums;
  for (size_t i = 0; i < batches_.size(); ++i) {
    RT_ASSIGN_OR_RETURN(losses.mean, pass_->Loss(at_, batches_[i], "mb" + std::to_string(i)));
    const std::vector<double> tokens = probe_.Finish();
    sums.push_back(SumInFp64(tokens));
    losses.tokens.insert(losses.tokens.end(), tokens.begin(), tokens.end());
  }
  if (!evaluation_) losses.mean = StepLoss(blamed_.recipe, sums);
  return losses;
}

Result<TokenLosses> LossAlong::AtShare(double share) {
  for (size_t s = 0; s < blamed_.before.size(); ++s) {
    const std::vector<float>&p = blamed_.before[s], &q = blamed_.after[s];
    slab(s).resize(p.size());
    for (size_t i = 0; i < p.size(); ++i) {
      const double there = p[i] + share * (static_cast<double>(q[i]) - p[i]);
      slab(s)[i] = share == 1 ? q[i] : static_cast<float>(there);
    }
  }
  return Here();
}

Result<TokenLosses> LossAlong::AtTensors(const std::vector<bool>& tensors, bool after) {
  for (size_t s = 0; s < blamed_.before.size(); ++s) {
    slab(s) = after ? blamed_.before[s] : blamed_.after[s];
    const std::vector<float>& from = after ? blamed_.after[s] : blamed_.before[s];
    for (const Piece& piece : layout_.pieces(static_cast<int>(s))) {
      if (!tensors[piece.tensor]) continue;
      std::copy_n(from.begin() + piece.offset, piece.numel(), slab(s).begin() + piece.offset);
    }
  }
  return Here();
}

// The level's groups of tensors that `only` matches, then the rest as one.
std::vector<TensorGroup> ChosenGroups(const Layout& layout, const BlameOptions& options) {
  std::vector<TensorGroup> groups;
  TensorGroup rest = {"all others", "", {}, options.level};
  for (TensorGroup& group : GroupsAt(layout, options.level)) {
    std::vector<int> chosen;
    for (int t : group.tensors) {
      const bool named = GlobMatches(options.only, layout.tensors()[t].name);
      (named ? chosen : rest.tensors).push_back(t);
    }
    group.tensors = std::move(chosen);
    if (!group.tensors.empty()) groups.push_back(std::move(group));
  }
  if (!rest.tensors.empty()) groups.push_back(std::move(rest));
  return groups;
}

// Shares at which the loss is asked for: those of the table and of the curvature, each once.
std::vector<double> SharesOf(const BlameOptions& options) {
  std::vector<double> shares = {0, 1};
  const double h = options.step;
  shares.insert(shares.end(), {-h, h, -2 * h, 2 * h});
  shares.insert(shares.end(), options.shares.begin(), options.shares.end());
  std::sort(shares.begin(), shares.end());
  shares.erase(std::unique(shares.begin(), shares.end()), shares.end());
  return shares;
}

// |change|^2 of tensors.
double ChangeSquare(const BlamedUpdate& blamed, const Layout& layout,
                    const std::vector<bool>& tensors) {
  double sum = 0;
  for (size_t s = 0; s < blamed.before.size(); ++s) {
    for (const Piece& piece : layout.pieces(static_cast<int>(s))) {
      if (!tensors[piece.tensor]) continue;
      for (int64_t i = piece.offset; i < piece.offset + piece.numel(); ++i) {
        const double d = static_cast<double>(blamed.after[s][i]) - blamed.before[s][i];
        sum += d * d;
      }
    }
  }
  return sum;
}

// The two ends against the records.
Status CheckEnds(const RunReader& run, const BlamedUpdate& blamed, BlameBatch on,
                 BlameReport* report) {
  const auto same = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  const auto differs = [&](const char* which, int64_t update, double recorded, double got) {
    return FailedError(fmt::format("{}: the loss {} update {} is {}, the record of update {} says "
                                   "{}; 'retrace replay {} --steps {}..{}' shows where they part",
                                   run.dir(), which, report->update, got, update, recorded,
                                   run.dir(), update, update));
  };
  const bool evaluation = on == BlameBatch::kEvaluation;
  if (on == BlameBatch::kUpdate || (evaluation && blamed.record.evaluation_loss)) {
    const double recorded = evaluation ? *blamed.record.evaluation_loss : blamed.record.loss;
    report->before_recorded = same(recorded, report->before.mean);
    if (!report->before_recorded) {
      return differs("before", report->update, recorded, report->before.mean);
    }
  }
  if (on == BlameBatch::kUpdate || !blamed.next || (evaluation && !blamed.next->evaluation_loss)) {
    return {};
  }
  const double recorded = evaluation ? *blamed.next->evaluation_loss : blamed.next->loss;
  report->after_recorded = same(recorded, report->after.mean);
  if (report->after_recorded || !blamed.next_comparable) return {};
  return differs("after", report->update + 1, recorded, report->after.mean);
}

class Blaming {
 public:
  Blaming(const BlamedUpdate& blamed, const Layout& layout, LossAlong& losses,
          const BlameOptions& options, int64_t passes)
      : blamed_(blamed), layout_(layout), losses_(losses), options_(options), passes_(passes) {}

  Status Along(BlameReport* report);
  Status Groups(BlameReport* report);

 private:
  void Tick() {
    if (options_.progress) options_.progress(++done_, passes_);
  }

  const BlamedUpdate& blamed_;
  const Layout& layout_;
  LossAlong& losses_;
  const BlameOptions& options_;
  const int64_t passes_;
  int64_t done_ = 0;
};

Status Blaming::Along(BlameReport* report) {
  std::map<double, double> at;
  for (const double share : SharesOf(options_)) {
    RT_ASSIGN_OR_RETURN(TokenLosses losses, losses_.AtShare(share));
    at[share] = losses.mean;
    if (share == 0) report->before = losses;
    if (share == 1) report->after = std::move(losses);
    Tick();
  }
  for (const double share : options_.shares) report->along.emplace_back(share, at[share]);
  const double h = options_.step;
  const auto second = [&](double step) {
    return (at[step] - 2 * at[0] + at[-step]) / (step * step);
  };
  report->curvature = blamed_.curvature;
  report->curvature.step = h;
  report->curvature.slope = (at[h] - at[-h]) / (2 * h);
  report->curvature.second = second(h);
  report->curvature.second_wide = second(2 * h);
  report->curvature.change2 =
      ChangeSquare(blamed_, layout_, std::vector<bool>(layout_.tensors().size(), true));
  return {};
}

Status Blaming::Groups(BlameReport* report) {
  for (const TensorGroup& group : ChosenGroups(layout_, options_)) {
    BlameGroup blame;
    blame.name = group.name;
    blame.glob = group.glob;
    std::vector<bool> in(layout_.tensors().size(), false);
    for (int t : group.tensors) {
      in[t] = true;
      blame.elements += layout_.tensors()[t].numel();
    }
    blame.tensors = std::ssize(group.tensors);
    blame.change = std::sqrt(ChangeSquare(blamed_, layout_, in));
    RT_ASSIGN_OR_RETURN(const TokenLosses alone, losses_.AtTensors(in, true));
    Tick();
    RT_ASSIGN_OR_RETURN(const TokenLosses without, losses_.AtTensors(in, false));
    Tick();
    blame.alone = alone.mean;
    blame.without = without.mean;
    report->groups.push_back(std::move(blame));
  }
  return {};
}

}  // namespace

std::vector<double> TokenLosses::BySequence() const {
  std::vector<double> means(sequences(), 0.0);
  for (size_t i = 0; i < tokens.size(); ++i) means[i / length] += tokens[i];
  for (double& mean : means) mean /= static_cast<double>(length);
  return means;
}

std::vector<double> TokenLosses::ByPosition() const {
  std::vector<double> means(length, 0.0);
  for (size_t i = 0; i < tokens.size(); ++i) means[i % length] += tokens[i];
  for (double& mean : means) mean /= static_cast<double>(sequences());
  return means;
}

double BlameReport::SumAlone() const {
  double sum = 0;
  for (const BlameGroup& group : groups) sum += group.alone - before.mean;
  return sum;
}

BlameBatch DefaultBatch(const Recipe& recipe) {
  return recipe.data.evaluation_samples > 0 ? BlameBatch::kEvaluation : BlameBatch::kUpdate;
}

Result<int64_t> BlamePasses(const Layout& layout, const BlameOptions& options) {
  if (!options.only.empty()) RT_RETURN_IF_ERROR(CheckGlob(layout, options.only));
  return std::ssize(SharesOf(options)) + 2 * std::ssize(ChosenGroups(layout, options));
}

Result<BlameReport> Blame(const RunReader& run, Job& job, int64_t update,
                          const BlameOptions& options) {
  RT_CHECK_EQ(1, job.comm().size());
  RT_ASSIGN_OR_RETURN(const int64_t passes, BlamePasses(job.layout(), options));
  RT_ASSIGN_OR_RETURN(const BlamedUpdate blamed, ReadUpdate(run, job, update));
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<LossAlong> losses,
                      LossAlong::Make(blamed, job, options.on));
  BlameReport report;
  report.update = update;
  Blaming blaming(blamed, job.layout(), *losses, options, passes);
  RT_RETURN_IF_ERROR(blaming.Along(&report));
  report.tokens = std::ssize(report.before.tokens);
  RT_RETURN_IF_ERROR(CheckEnds(run, blamed, options.on, &report));
  RT_RETURN_IF_ERROR(blaming.Groups(&report));
  return report;
}

}  // namespace retrace
