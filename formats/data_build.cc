#include "formats/data_build.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <cmath>
#include <unordered_map>
#include <utility>

#include "formats/pending_file.h"

namespace retrace {
namespace {

// Counts tokens for the entropy: a table for ids that occur in practice, a map for the rest (a
// damaged or foreign file may hold any int32).
class TokenCounts {
 public:
  void Add(const std::vector<int32_t>& tokens) {
    for (int32_t token : tokens) {
      if (token >= kTable) {
        ++rare_[token];
        continue;
      }
      if (static_cast<size_t>(token) >= table_.size())
        table_.resize(static_cast<size_t>(token) + 1);
      ++table_[static_cast<size_t>(token)];
    }
    total_ += static_cast<int64_t>(tokens.size());
  }

  int64_t Distinct() const {
    return static_cast<int64_t>(rare_.size()) +
           std::count_if(table_.begin(), table_.end(), [](int64_t count) { return count > 0; });
  }

  double EntropyNats() const {
    double entropy = 0;
    const auto add = [&entropy, this](int64_t count) {
      if (count == 0) return;
      const double share = static_cast<double>(count) / static_cast<double>(total_);
      entropy -= share * std::log(share);
    };
    for (int64_t count : table_) add(count);
    for (const auto& [token, count] : rare_) add(count);
    return entropy;
  }

 private:
  static constexpr int32_t kTable = 1 << 20;
  std::vector<int64_t> table_;
  std::unordered_map<int32_t, int64_t> rare_;
  int64_t total_ = 0;
};

void Report(const DataProgress& progress, std::string_view phase, double fraction) {
  if (progress) progress(phase, fraction);
}

Status CheckOptions(const DataBuildOptions& options) {
  if (options.output_prefix.empty() || options.output_prefix.ends_with('/')) {
    return UsageError(fmt::format("output: expected the prefix of the files to write, got '{}'",
                                  options.output_prefix));
  }
  if (options.min_document_tokens < 1) {
    return UsageError(fmt::format("minimum document tokens: expected 1 or more, got {}",
                                  options.min_document_tokens));
  }
  return {};
}

Result<std::string> TrainModel(const DataBuildOptions& options, const DataProgress& progress) {
  RT_ASSIGN_OR_RETURN(TextSource text, TextSource::Open(options.text));
  TrainingSample sample(options.training);
  std::string document;
  for (;;) {
    RT_ASSIGN_OR_RETURN(const bool more, text.Next(&document));
    if (!more) break;
    sample.AddDocument(document);
    if (text.documents() % 256 == 0) Report(progress, "reading", text.Fraction());
  }
  Report(progress, "reading", 1);
  Report(progress, "training the tokenizer", 0);
  auto model = sample.Train();
  if (model.ok()) Report(progress, "training the tokenizer", 1);
  return model;
}

// The trained model, complete on disk under its partial name. Refused here, before the long work of
// tokenizing, where another tokenizer has the name.
Result<PendingFile> PrepareModel(const std::string& path, const std::string& model,
                                 bool overwrite) {
  RT_ASSIGN_OR_RETURN(PendingFile file, PendingFile::Create(path));
  RT_RETURN_IF_ERROR(file.Write(model.data(), model.size()));
  RT_RETURN_IF_ERROR(file.Sync());
  RT_ASSIGN_OR_RETURN(const bool same, file.SameAsPublished());
  if (!same && !overwrite && FileExists(path)) {
    return UsageError(
        fmt::format("{}: a different tokenizer of this name exists; choose another output "
                    "name or ask for it to be overwritten",
                    path));
  }
  return file;
}

Status EncodeDocuments(const DataBuildOptions& options, const Tokenizer& tokenizer,
                       const DataProgress& progress, IndexedDatasetWriter* writer,
                       DataBuildResult* result) {
  RT_ASSIGN_OR_RETURN(TextSource text, TextSource::Open(options.text));
  TokenCounts counts;
  std::string document;
  std::vector<int32_t> ids;
  for (;;) {
    RT_ASSIGN_OR_RETURN(const bool more, text.Next(&document));
    if (!more) break;
    RT_RETURN_IF_ERROR(tokenizer.Encode(document, &ids));
    ids.push_back(tokenizer.eos_id());
    if (static_cast<int64_t>(ids.size()) < options.min_document_tokens) {
      ++result->documents_left_out;
      continue;
    }
    counts.Add(ids);
    RT_RETURN_IF_ERROR(writer->AddDocument(ids));
    if (writer->documents() % 256 == 0) Report(progress, "tokenizing", text.Fraction());
  }
  if (writer->documents() == 0) {
    return UsageError(
        fmt::format("{}: no document of at least {} tokens was found in {} bytes of text",
                    options.text.inputs[0], options.min_document_tokens, text.text_bytes()));
  }
  Report(progress, "tokenizing", 1);
  result->documents = writer->documents();
  result->tokens = writer->tokens();
  result->text_bytes = text.text_bytes();
  result->replaced_sequences = text.replaced_sequences();
  result->unigram_entropy_nats = counts.EntropyNats();
  return {};
}

// Before minutes of work, not after.
Status MakeFolderOf(const std::string& prefix) {
  const std::filesystem::path folder = std::filesystem::path(prefix).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  if (!error) return {};
  return UsageError(fmt::format("{}: the folder can not be made: {}", folder.string(),
                                error.message()));
}

}  // namespace

Result<DataBuildResult> BuildDataset(const DataBuildOptions& options,
                                     const DataProgress& progress) {
  const auto start = std::chrono::steady_clock::now();
  RT_RETURN_IF_ERROR(CheckOptions(options));
  RT_RETURN_IF_ERROR(MakeFolderOf(options.output_prefix));
  DataBuildResult result;
  std::vector<PendingFile> trained;  // the new tokenizer, if any, until it is published
  std::string model;
  const bool train = options.tokenizer.empty();
  result.tokenizer_path = train ? options.output_prefix + ".model" : options.tokenizer;
  if (train) {
    RT_ASSIGN_OR_RETURN(model, TrainModel(options, progress));
    RT_ASSIGN_OR_RETURN(PendingFile file,
                        PrepareModel(result.tokenizer_path, model, options.overwrite));
    trained.push_back(std::move(file));
  }
  RT_ASSIGN_OR_RETURN(const Tokenizer tokenizer,
                      train ? Tokenizer::FromModel(model, result.tokenizer_path)
                            : Tokenizer::Load(options.tokenizer));
  if (tokenizer.eos_id() < 0) {
    return UsageError(
        fmt::format("{}: expected a tokenizer with an end-of-sequence token, got one "
                    "without; use another model",
                    result.tokenizer_path));
  }
  result.vocab_size = tokenizer.vocab_size();
  result.eos_id = tokenizer.eos_id();
  result.tokenizer_digest = tokenizer.digest();
  result.token_type = TokenTypeForVocabulary(result.vocab_size);
  RT_ASSIGN_OR_RETURN(IndexedDatasetWriter writer,
                      IndexedDatasetWriter::Create(options.output_prefix, result.vocab_size));
  RT_RETURN_IF_ERROR(EncodeDocuments(options, tokenizer, progress, &writer, &result));
  Report(progress, "writing", 0);
  using Existing = IndexedDatasetWriter::Existing;
  RT_ASSIGN_OR_RETURN(const auto outcome,
                      writer.Publish(options.overwrite ? Existing::kReplace : Existing::kRefuse));
  result.identical = outcome == IndexedDatasetWriter::Outcome::kIdentical;
  for (PendingFile& file : trained) RT_RETURN_IF_ERROR(file.Publish());
  RT_ASSIGN_OR_RETURN(const IndexedDataset dataset,
                      IndexedDataset::Open(options.output_prefix, result.vocab_size));
  result.identity = dataset.identity();
  Report(progress, "writing", 1);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  result.seconds = elapsed.count();
  return result;
}

Result<DatasetSummary> InspectDataset(const std::string& prefix, const InspectOptions& options,
                                      const DataProgress& progress) {
  RT_ASSIGN_OR_RETURN(const IndexedDataset dataset, IndexedDataset::Open(prefix));
  DatasetSummary summary;
  summary.documents = dataset.documents();
  summary.sequences = dataset.sequences();
  summary.tokens = dataset.tokens();
  summary.token_type = dataset.token_type();
  summary.bin_size_bytes = dataset.bin_size_bytes();
  summary.identity = dataset.identity();
  TokenCounts counts;
  std::vector<int32_t> tokens, lengths;
  int32_t low = INT32_MAX, high = 0;
  for (int64_t i = 0; i < dataset.sequences(); ++i) {
    RT_RETURN_IF_ERROR(dataset.Read(i, &tokens));
    counts.Add(tokens);
    for (int32_t token : tokens) {
      low = std::min(low, token);
      high = std::max(high, token);
    }
    if (i < options.first_sequences) {
      const int64_t keep =
          std::min<int64_t>(options.tokens_each, static_cast<int64_t>(tokens.size()));
      summary.first_sequences.emplace_back(tokens.begin(),
                                           tokens.begin() + std::max<int64_t>(keep, 0));
    }
    if (i % 4096 == 0) {
      Report(progress, "reading",
             static_cast<double>(i) / static_cast<double>(dataset.sequences()));
    }
  }
  Report(progress, "reading", 1);
  if (dataset.tokens() > 0) {
    summary.min_token = low;
    summary.max_token = high;
  }
  summary.distinct_tokens = counts.Distinct();
  summary.unigram_entropy_nats = counts.EntropyNats();
  RT_RETURN_IF_ERROR(dataset.ReadLengths(0, dataset.sequences(), &lengths));
  if (!lengths.empty()) {
    std::sort(lengths.begin(), lengths.end());
    summary.min_length = lengths.front();
    summary.median_length = lengths[(lengths.size() - 1) / 2];
    summary.max_length = lengths.back();
  }
  return summary;
}

}  // namespace retrace
