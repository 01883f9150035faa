#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "formats/data_build.h"

namespace retrace {
namespace {

using nlohmann::ordered_json;

constexpr char kBuildExamples[] = R"(Examples:
  # A tokenizer of 4096 pieces and a dataset from the first 12 MB of a dictionary.
  retrace data build /usr/share/dictd/gcide.dict.dz -o gcide --vocab-size 4096 --max-text 12MB
  # One's own text with an existing tokenizer, each paragraph a document.
  retrace data build a.txt b.txt.gz -o mine --tokenizer gcide.model --min-document 1
Writes PREFIX.bin, PREFIX.idx and, if it trained a tokenizer, PREFIX.model. The same text and
options give the same bytes.)";

constexpr char kInspectExamples[] = R"(Examples:
  retrace data inspect gcide
  retrace data inspect gcide --tokenizer gcide.model --first 1 --tokens 64
Every token is read. Exit code 3: the files are damaged.)";

// One line on a terminal, rewritten in place; nothing elsewhere.
class ProgressLine {
 public:
  explicit ProgressLine(bool quiet) : shown_(!quiet && isatty(STDERR_FILENO) != 0) {}
  ~ProgressLine() {
    if (!last_.empty()) WriteError("\r\033[K");
  }
  void Show(std::string_view phase, double fraction) {
    if (!shown_) return;
    std::string line = fmt::format("{} {:3.0f} %", phase, std::floor(fraction * 100));
    if (line == last_) return;
    WriteError("\r\033[K" + line);
    last_ = std::move(line);
  }

 private:
  bool shown_;
  std::string last_;
};

struct BuildFlags {
  DataBuildOptions options;
  bool json = false, quiet = false;
};

void PrintBuilt(const BuildFlags& flags, const DataBuildResult& r) {
  if (flags.json) {
    const ordered_json json = {{"prefix", flags.options.output_prefix},
                               {"documents", r.documents},
                               {"tokens", r.tokens},
                               {"documents_left_out", r.documents_left_out},
                               {"text_bytes", r.text_bytes},
                               {"replaced_sequences", r.replaced_sequences},
                               {"vocab_size", r.vocab_size},
                               {"eos_id", r.eos_id},
                               {"token_type", TokenTypeName(r.token_type)},
                               {"unigram_entropy_nats", r.unigram_entropy_nats},
                               {"tokenizer", r.tokenizer_path},
                               {"tokenizer_digest", r.tokenizer_digest.Hex()},
                               {"identity", r.identity.Hex()},
                               {"identical", r.identical},
                               {"seconds", r.seconds}};
    fmt::print("{}\n", json.dump(2, ' ', false, ordered_json::error_handler_t::replace));
    return;
  }
  fmt::print("dataset    {}.bin, .idx{}\n", flags.options.output_prefix,
             r.identical ? " (was there already, the same)" : "");
  fmt::print("identity   {}\n", r.identity.Hex());
  fmt::print("documents  {}{}\n", r.documents,
             r.documents_left_out == 0
                 ? ""
                 : fmt::format(" ({} shorter ones left out)", r.documents_left_out));
  fmt::print("tokens     {} ({}) from {} bytes of text, {:.2f} bytes each\n", r.tokens,
             TokenTypeName(r.token_type), r.text_bytes,
             static_cast<double>(r.text_bytes) / static_cast<double>(r.tokens));
  fmt::print("tokenizer  {}: {} pieces, eos {}, {}\n", r.tokenizer_path, r.vocab_size, r.eos_id,
             r.tokenizer_digest.Hex());
  fmt::print("entropy    {:.3f} nats per token (unigram); uniform would be {:.3f}\n",
             r.unigram_entropy_nats, std::log(static_cast<double>(r.vocab_size)));
  if (r.replaced_sequences > 0) {
    fmt::print("repaired   {} byte sequences that are not UTF-8 became U+FFFD\n",
               r.replaced_sequences);
  }
  fmt::print("time       {:.1f} s\n", r.seconds);
}

void RunBuild(const BuildFlags& flags) {
  Result<DataBuildResult> built = [&flags] {
    ProgressLine line(flags.quiet || flags.json);
    return BuildDataset(flags.options, [&line](std::string_view phase, double fraction) {
      line.Show(phase, fraction);
    });
  }();
  if (!built.ok()) Fail(built.status());
  PrintBuilt(flags, *built);
}

void AddBuild(CLI::App& data) {
  CLI::App* build = data.add_subcommand("build", "Build a dataset from text files");
  auto flags = std::make_shared<BuildFlags>();
  DataBuildOptions& o = flags->options;
  build->add_option("inputs", o.text.inputs, "Text files, plain or gzip (.gz, .dz)")->required();
  build->add_option("-o,--out,--output", o.output_prefix, "Prefix of the files to write")
      ->required();
  CLI::Option* given = build->add_option("--tokenizer", o.tokenizer,
                                         "A SentencePiece model; without it one is trained");
  build->add_option("--vocab-size", o.training.vocab_size, "Pieces of the tokenizer to train")
      ->capture_default_str()
      ->excludes(given);
  build
      ->add_option("--training-text", o.training.max_sample_bytes,
                   "Most text to train the tokenizer on (such as 4MiB)")
      ->transform(CLI::AsSizeValue(true))
      ->capture_default_str()
      ->excludes(given);
  WholeIn(build->add_option("--seed", o.training.seed, "Of the choice of lines to train on"), 0)
      ->capture_default_str()
      ->excludes(given);
  build
      ->add_option("--max-text", o.text.max_text_bytes,
                   "Stop after so much text (12MB); 0: read all")
      ->transform(CLI::AsSizeValue(true))
      ->capture_default_str();
  build
      ->add_option("--min-document", o.text.min_document_bytes,
                   "Join paragraphs or entries up to so many bytes")
      ->capture_default_str();
  build
      ->add_option("--max-document", o.text.max_document_bytes,
                   "Cut documents at a blank line beyond so many bytes")
      ->capture_default_str();
  build
      ->add_option("--min-document-tokens", o.min_document_tokens,
                   "Leave out documents of fewer tokens")
      ->capture_default_str();
  build->add_flag("--overwrite", o.overwrite, "Replace a different dataset of the same name");
  build->add_flag("--json", flags->json, "Print the result as JSON");
  build->add_flag("-q,--quiet", flags->quiet, "No progress");
  build->footer(kBuildExamples);
  build->callback([flags] { RunBuild(*flags); });
}

struct InspectFlags {
  std::string prefix, tokenizer;
  InspectOptions options;
  bool json = false, quiet = false;
};

void PrintSummary(const InspectFlags& flags, const DatasetSummary& s,
                  const std::optional<Tokenizer>& tokenizer) {
  const auto text_of = [&tokenizer](const std::vector<int32_t>& ids) {
    auto text = tokenizer->Decode(ids);
    if (!text.ok()) Fail(text.status());
    return *text;
  };
  if (flags.json) {
    ordered_json json = {{"prefix", flags.prefix},
                         {"documents", s.documents},
                         {"sequences", s.sequences},
                         {"tokens", s.tokens},
                         {"token_type", TokenTypeName(s.token_type)},
                         {"bin_size_bytes", s.bin_size_bytes},
                         {"identity", s.identity.Hex()},
                         {"min_length", s.min_length},
                         {"median_length", s.median_length},
                         {"max_length", s.max_length},
                         {"min_token", s.min_token},
                         {"max_token", s.max_token},
                         {"distinct_tokens", s.distinct_tokens},
                         {"unigram_entropy_nats", s.unigram_entropy_nats},
                         {"first_sequences", s.first_sequences}};
    if (tokenizer) {
      for (const auto& ids : s.first_sequences) json["first_texts"].push_back(text_of(ids));
    }
    fmt::print("{}\n", json.dump(2, ' ', false, ordered_json::error_handler_t::replace));
    return;
  }
  fmt::print("identity   {}\n", s.identity.Hex());
  fmt::print("documents  {} in {} sequences\n", s.documents, s.sequences);
  fmt::print("tokens     {} ({}, {} bytes)\n", s.tokens, TokenTypeName(s.token_type),
             s.bin_size_bytes);
  fmt::print("lengths    {} .. {}, median {}\n", s.min_length, s.max_length, s.median_length);
  fmt::print("ids        {} .. {}, {} distinct\n", s.min_token, s.max_token, s.distinct_tokens);
  fmt::print("entropy    {:.3f} nats per token (unigram)\n", s.unigram_entropy_nats);
  for (size_t i = 0; i < s.first_sequences.size(); ++i) {
    fmt::print("sequence {}  {}\n", i, fmt::join(s.first_sequences[i], " "));
    if (tokenizer) fmt::print("{}\n", text_of(s.first_sequences[i]));
  }
}

void RunInspect(const InspectFlags& flags) {
  std::optional<Tokenizer> tokenizer;
  if (!flags.tokenizer.empty()) {
    auto loaded = Tokenizer::Load(flags.tokenizer);
    if (!loaded.ok()) Fail(loaded.status());
    tokenizer = std::move(loaded).value();
  }
  Result<DatasetSummary> summary = [&flags] {
    ProgressLine line(flags.quiet || flags.json);
    return InspectDataset(
        flags.prefix, flags.options,
        [&line](std::string_view phase, double fraction) { line.Show(phase, fraction); });
  }();
  if (!summary.ok()) Fail(summary.status());
  PrintSummary(flags, *summary, tokenizer);
}

void AddInspect(CLI::App& data) {
  CLI::App* inspect = data.add_subcommand("inspect", "Say what a dataset holds");
  auto flags = std::make_shared<InspectFlags>();
  inspect->add_option("prefix", flags->prefix, "Prefix of a .bin and .idx, or either file")
      ->required();
  inspect->add_option("--tokenizer", flags->tokenizer,
                      "Show the first tokens as text by this model");
  inspect->add_option("--first", flags->options.first_sequences, "Sequences to show")
      ->capture_default_str();
  inspect->add_option("--tokens", flags->options.tokens_each, "Tokens to show of each")
      ->capture_default_str();
  inspect->add_flag("--json", flags->json, "Print the result as JSON");
  inspect->add_flag("-q,--quiet", flags->quiet, "No progress");
  inspect->footer(kInspectExamples);
  inspect->callback([flags] { RunInspect(*flags); });
}

}  // namespace

void AddDataCommand(CLI::App& app) {
  CLI::App* data =
      app.add_subcommand("data", "Build and inspect datasets (Megatron .bin and .idx)");
  data->require_subcommand(1);
  AddBuild(*data);
  AddInspect(*data);
}

}  // namespace retrace
