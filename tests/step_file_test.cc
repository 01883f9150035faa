#include "formats/step_file.h"

#include <gtest/gtest.h>
#include <hdf5.h>

#include <cstring>
#include <random>

#include "formats/chunk_codec.h"
#include "formats/chunk_planes.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

// Slabs of several chunks with a partial last one.
Layout BigLayout() {
  ModelRecipe model = SmallModel();
  model.vocab_size = 20000;
  model.hidden_size = 32;
  return Layout::Make(model, 2).value();
}

std::vector<std::vector<float>> RandomSlabs(const Layout& layout) {
  std::mt19937 bits(7);
  std::vector<std::vector<float>> slabs(layout.shards());
  for (int s = 0; s < layout.shards(); ++s) {
    slabs[s].resize(layout.slab_numel(s));
    for (float& x : slabs[s]) x = static_cast<float>(static_cast<int32_t>(bits())) * 1e-12f;
  }
  return slabs;
}

std::vector<SlabContents> Journals(const std::vector<std::vector<float>>& slabs) {
  std::vector<SlabContents> contents;
  for (size_t s = 0; s < slabs.size(); ++s) {
    contents.push_back({{static_cast<int>(s), SlabKind::kG, {}}, slabs[s].data()});
  }
  return contents;
}

TEST(ChunkCodec, ShuffleDealsBytesIntoPlanesAndBack) {
  for (size_t count : {0, 1, 15, 16, 17, 64, 1000}) {
    std::vector<float> in(count), out(count);
    unsigned char* bytes = reinterpret_cast<unsigned char*>(in.data());
    for (size_t i = 0; i < 4 * count; ++i) bytes[i] = static_cast<unsigned char>(i * 37 + i / 256);
    std::vector<unsigned char> planes(4 * count);
    ShuffleBytes(in.data(), count, planes.data());
    for (size_t i = 0; i < 4 * count; ++i) ASSERT_EQ(bytes[i], planes[i % 4 * count + i / 4]) << i;
    UnshuffleBytes(planes.data(), count, out.data());
    EXPECT_EQ(0, std::memcmp(in.data(), out.data(), 4 * count));
  }
}

TEST(ChunkCodec, AnyPartOfAChunkIsTheSameNumbers) {
  constexpr size_t kCount = 200;
  std::vector<float> in(kCount);
  for (size_t i = 0; i < kCount; ++i) in[i] = static_cast<float>(i) * -0.37f;
  std::vector<unsigned char> planes(4 * kCount);
  ShuffleBytes(in.data(), kCount, planes.data());
  for (size_t first : {0, 1, 16, 33, 199}) {
    for (size_t count = 0; first + count <= kCount; ++count) {
      std::vector<float> out(count + 1, 7.0f);
      UnshufflePart(planes.data() + first, kCount, count, out.data());
      ASSERT_EQ(0, std::memcmp(in.data() + first, out.data(), 4 * count)) << first << " " << count;
      ASSERT_EQ(7.0f, out[count]);  // nothing behind it is touched
    }
  }
}

TEST(ChunkCodec, EveryBitPatternSurvives) {
  std::vector<float> in = {0.0f, -0.0f, 1e-45f, INFINITY, -INFINITY, NAN}, out(in.size());
  std::vector<char> memory;
  const std::string_view encoded = ChunkEncoder().Encode(in.data(), in.size(), 8, &memory);
  ASSERT_TRUE(ChunkDecoder().Decode(encoded, 8, out.data(), out.size()));
  EXPECT_EQ(0, std::memcmp(in.data(), out.data(), in.size() * sizeof(float)));
  EXPECT_FALSE(ChunkDecoder().Decode(encoded, 9, out.data(), out.size()));
  EXPECT_FALSE(ChunkDecoder().Decode(encoded.substr(1), 8, out.data(), out.size()));
}

TEST(StepFile, BytesDependOnContentAloneNotOnThreads) {
  const Layout layout = BigLayout();
  const auto slabs = RandomSlabs(layout);
  const RankFile one = BuildRankFile(layout, 5, 1, 0, Journals(slabs), 1).value();
  const RankFile three = BuildRankFile(layout, 5, 1, 0, Journals(slabs), 3).value();
  EXPECT_EQ(one.info, three.info);
  EXPECT_TRUE(one.bytes.view() == three.bytes.view());
  EXPECT_EQ(DigestOf(one.bytes.view()), one.info.digest);
}

TEST(StepFile, BytesDoNotDependOnWhatTheirMemoryHeldBefore) {
  const Layout layout = SmallLayout();
  const State state = StateAt(layout, 3);
  const std::vector<SlabContents> slabs = {
      {{0, SlabKind::kP, {}}, state.shards[0].slab(Component::kParameter).data()},
      {{1, SlabKind::kM, {}}, state.shards[1].slab(Component::kM).data()}};
  const RankFile fresh = BuildRankFile(layout, 3, 1, 0, slabs, 1).value();
  for (const size_t capacity : {size_t{100}, fresh.bytes.size, size_t{4} << 20}) {
    Bytes spare;
    spare.data.reset(static_cast<char*>(std::malloc(capacity)));
    spare.capacity = capacity;
    std::memset(spare.data.get(), 0xab, capacity);
    const RankFile again =
        BuildRankFile(layout, 3, 1, 0, slabs, 1, kChunkLevel, std::move(spare)).value();
    EXPECT_TRUE(again.bytes.view() == fresh.bytes.view()) << capacity;
    EXPECT_EQ(again.info, fresh.info);
  }
}

TEST(StepFile, ManyChunksComeBackOnAnyNumberOfThreads) {
  const TempDir temp;
  const Layout layout = BigLayout();
  const auto slabs = RandomSlabs(layout);
  const RankFile file = BuildRankFile(layout, 5, 1, 0, Journals(slabs), 2).value();
  ASSERT_GT(file.info.slabs[0].chunks.size(), 1u);
  ASSERT_TRUE(PublishFile(FileOps(), temp.path(), file.info.name, file.bytes.view()).ok());
  for (int threads : {1, 3}) {
    std::vector<float> read(layout.slab_numel(1));
    const SlabTarget target = {{1, SlabKind::kG, {}}, read.data()};
    const Status status =
        ReadRankFile(FileOps(), temp.path(), file.info, layout, {target}, threads);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(slabs[1], read);
  }
}

TEST(StepFile, RankFilesAreHdf5WithTheUsualFilters) {
  const TempDir temp;
  const Layout layout = BigLayout();
  const auto slabs = RandomSlabs(layout);
  const RankFile file = BuildRankFile(layout, 5, 1, 0, Journals(slabs), 2).value();
  WriteFileText(temp / "file.h5", std::string(file.bytes.view()));
  const hid_t hdf5 = H5Fopen((temp / "file.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  ASSERT_GE(hdf5, 0);
  const hid_t dataset = H5Dopen2(hdf5, "/shard_0001/g", H5P_DEFAULT);
  ASSERT_GE(dataset, 0);
  const hid_t properties = H5Dget_create_plist(dataset);
  ASSERT_EQ(2, H5Pget_nfilters(properties));
  for (int i = 0; i < 2; ++i) {
    unsigned flags = 0;
    size_t values = 0;
    EXPECT_EQ(i == 0 ? H5Z_FILTER_SHUFFLE : 32015,
              H5Pget_filter2(properties, i, &flags, &values, nullptr, 0, nullptr, nullptr));
  }
  std::vector<float> read(layout.slab_numel(1));
  EXPECT_GE(H5Dread(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, read.data()), 0);
  EXPECT_EQ(slabs[1], read);
  H5Pclose(properties);
  H5Dclose(dataset);
  H5Fclose(hdf5);
}

TEST(StepFile, NamesRoundTripAndOthersAreRefused) {
  StepFileName parsed;
  ASSERT_TRUE(ParseStepFileName(RankFileName(17, 3, 12), &parsed));
  EXPECT_EQ(17, parsed.position);
  EXPECT_EQ(3, parsed.attempt);
  EXPECT_EQ(12, parsed.rank);
  EXPECT_FALSE(parsed.temporary);
  ASSERT_TRUE(ParseStepFileName(MasterFileName(123456789012, 10000) + ".tmp", &parsed));
  EXPECT_EQ(123456789012, parsed.position);
  EXPECT_EQ(10000, parsed.attempt);
  EXPECT_EQ(-1, parsed.rank);
  EXPECT_TRUE(parsed.temporary);
  for (const char* other : {"", "notes.txt", "5.h5", "5.a1", "5.a1.r.h5", "-5.a1.h5", "5.a1.h5x",
                            "99999999999999999999.a1.h5"}) {
    EXPECT_FALSE(ParseStepFileName(other, &parsed)) << other;
  }
}

TEST(StepIndex, RankFileInfoSurvivesTheWayToRankZero) {
  const Layout layout = SmallLayout();
  const State state = StateAt(layout, 3);
  std::vector<SlabContents> contents = {
      {{1, SlabKind::kG, {}}, state.shards[1].slabs[0].data()},
      {{0, SlabKind::kPartialM, {0, 2}}, state.shards[0].slabs[1].data()}};
  const RankFileInfo info = BuildRankFile(layout, 3, 1, 7, contents, 1).value().info;
  EXPECT_EQ(info, ParseRankFileInfo(RankFileInfoText(info)).value());
}

TEST(StepIndex, TextThatIsNotAnIndexIsDamagedNeverACrash) {
  const std::string good = RankFileInfoText(
      BuildRankFile(SmallLayout(), 3, 1, 7, {}, 1).value().info);
  for (const std::string& bad :
       {std::string(), std::string("[]"), std::string("{}"), good.substr(1),
        std::string(100000, '['), std::string("{\"position\":-1}"),
        std::string("{\"position\":1e300}"), std::string("{\"position\":18446744073709551615}")}) {
    EXPECT_EQ(StatusCode::kDamaged, ParseRankFileInfo(bad).status().code()) << bad.substr(0, 50);
    EXPECT_EQ(StatusCode::kDamaged, ParseStepIndex(bad).status().code()) << bad.substr(0, 50);
    EXPECT_EQ(StatusCode::kDamaged, ParseCounters(bad).status().code()) << bad.substr(0, 50);
  }
}

}  // namespace
}  // namespace retrace
