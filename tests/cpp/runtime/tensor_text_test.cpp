#include "deepcompile/runtime/tensor_text.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "support/ranks.h"

namespace dc {
namespace {

using testing::errorOf;

TEST(TensorText, ShowsTheElementsOfEveryDtypeAsNumbers) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte}) {
    EXPECT_EQ(tensorToString(at::arange(3).to(dtype)), "[0, 1, 2]") << dtype;
  }
  EXPECT_EQ(tensorToString(at::ones({2}, at::kBool)), "[1, 1]");
  EXPECT_EQ(tensorToString(at::full({}, 1.5)), "[1.5]");
  EXPECT_EQ(tensorToString(at::ones({0})), "[]");
}

TEST(TensorText, ShowsNoMoreElementsAndCharactersThanAskedFor) {
  EXPECT_EQ(tensorToString(at::arange(100), 3), "[0, 1, 2]");
  EXPECT_EQ(tensorToString(at::arange(100), 20, 5), "[0, 1,...]");
}

TEST(TensorText, ElementsAreInLogicalOrderWhateverTheLayout) {
  EXPECT_EQ(tensorToString(at::arange(4).view({2, 2}).t()), "[0, 2, 1, 3]");
}

TEST(TensorText, ADtypeWithoutTextIsAnErrorThatNamesIt) {
  EXPECT_HAS(errorOf([] { tensorToString(at::ones({1}, at::kComplexFloat)); }), "ComplexFloat");
}

TEST(TensorText, PointersOfAKnownTypeAreShownDirectly) {
  std::vector<float> values = {1.5, -2};
  EXPECT_EQ(tensorPtrToString(values.data(), values.size()), "[1.5, -2]");
  EXPECT_EQ(tensorPtrToString(values.data(), values.size(), at::kFloat), "[1.5, -2]");
}

TEST(TensorText, DimensionsAsTextAndAsVector) {
  EXPECT_EQ(tensorDimToString(at::ones({2, 3})), "[2, 3]");
  EXPECT_EQ(tensorDimToString(at::full({}, 1)), "[]");
  EXPECT_EQ(sizes_to_int_vector(at::ones({2, 3}).sizes()), (std::vector<std::int64_t>{2, 3}));
}

// The numbers of ncclDataType_t.
TEST(TensorText, NcclNumbersAreThoseOfItsHeader) {
  EXPECT_EQ(get_nccl_data_type(at::kChar), 0);
  EXPECT_EQ(get_nccl_data_type(at::kByte), 1);
  EXPECT_EQ(get_nccl_data_type(at::kInt), 2);
  EXPECT_EQ(get_nccl_data_type(at::kLong), 4);
  EXPECT_EQ(get_nccl_data_type(at::kHalf), 6);
  EXPECT_EQ(get_nccl_data_type(at::kFloat), 7);
  EXPECT_EQ(get_nccl_data_type(at::kDouble), 8);
  EXPECT_EQ(get_nccl_data_type(at::kBFloat16), 9);
  EXPECT_HAS(errorOf([] { get_nccl_data_type(at::kComplexFloat); }), "NCCL has no type for ComplexFloat");
}

}  // namespace
}  // namespace dc
