#include "src/ops/embedding/cases.h"

#include "src/ops/embedding/table.h"
#include "tests/ops/op_test.h"

namespace vivace {
namespace {

TEST(Embedding, EveryRowGivesTheTablesExactValues) {
  for (const EmbeddingCase& c : embedding_cases(CaseSize::test)) {
    SCOPED_TRACE(c.name);
    EmbeddingProblem want(c, 1);
    ASSERT_OK(embedding_reference(want.args, Stream{}));
    for (const Stream& stream : test_streams()) {
      for_each_fitting_row(kEmbedding, want.args, stream, [&](const auto& row) {
        SCOPED_TRACE(row.name);
        EmbeddingProblem got(c, 1);
        ASSERT_OK(row.run(got.args, stream));
        EXPECT_TRUE(close(got.y, want.y, Bound{}));
        EXPECT_TRUE(got.y.canaries_intact());
      });
    }
  }
}

// Ids that a GPU row meets only when it runs: zeros, and nothing outside the table is read.
TEST(Embedding, DeviceRowsGiveZerosForIdsOutside) {
  for (const DType table : {DType::f32, DType::bf16}) {
    const EmbeddingCase c{"", 6, 10, 136, table, false, table};
    const EmbeddingProblem shape(c, 1);
    for (const Stream& stream : test_streams()) {
      if (stream.device == Device::cpu) continue;
      for_each_fitting_row(kEmbedding, shape.args, stream, [&](const auto& row) {
        EmbeddingProblem p(c, 1);
        const int32_t ids[] = {0, -1, 10, INT32_MIN, INT32_MAX, 9};
        std::copy(ids, ids + 6, p.ids.as<int32_t>());
        ASSERT_OK(row.run(p.args, stream));
        for (int64_t t = 0; t < 6; ++t) {
          const std::vector<double> got = values_of(p.y.tensor().at(t));
          const bool outside = ids[t] < 0 || ids[t] >= 10;
          EXPECT_EQ(got, outside ? std::vector<double>(136, 0) : values_of(p.table.tensor().at(ids[t]))) << t;
        }
      });
    }
  }
}

TEST(Embedding, HandWorked) {
  float table[] = {1, 2, 3, 4, 5, 6}, y[4];
  int32_t ids[] = {2, 0};
  const EmbeddingArgs args{.ids = Tensor(ids, DType::i32, {2}),
                           .table = Tensor(table, DType::f32, {3, 2}),
                           .y = Tensor(y, DType::f32, {2, 2})};
  ASSERT_OK(embedding(args, Stream{}));
  EXPECT_EQ(y[0], 5);
  EXPECT_EQ(y[1], 6);
  EXPECT_EQ(y[2], 1);
  EXPECT_EQ(y[3], 2);
}

TEST(Embedding, RefusesIdsOutsideTheTableBeforeWriting) {
  EmbeddingProblem p({"", 4, 10, 8}, 1);
  for (const int32_t bad : {-1, 10, INT32_MIN, INT32_MAX}) {
    p.ids.as<int32_t>()[2] = bad;
    EXPECT_FAILS(
        embedding(p.args, Stream{}), Code::invalid_argument,
        "embedding: ids[2] is " + std::to_string(bad) + ", needs 0 <= id < vocab = 10 (from table.shape[0])");
    EXPECT_TRUE(std::isnan(p.y.as<float>()[0]));
  }
}

TEST(Embedding, RefusesWhatDisagrees) {
  EmbeddingProblem p({"", 4, 10, 8}, 1);
  EmbeddingArgs args = p.args;
  args.y.shape[1] = 7;
  EXPECT_FAILS(embedding(args, Stream{}), Code::invalid_argument,
               "embedding: y.shape[1] is 7, needs hidden = 8 (from table.shape[1])");
  args = p.args;
  args.ids.dtype = DType::f32;
  EXPECT_FAILS(embedding(args, Stream{}), Code::invalid_argument, "needs ids of type i32, got f32");
}

}  // namespace
}  // namespace vivace
