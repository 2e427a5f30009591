#include "deepcompile/base/environment.h"

#include <cstdlib>

#include <gtest/gtest.h>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

TEST(Environment, UnsetAndEmptyVariablesTakeTheirDefaults) {
  unsetenv("DEEPCOMPILE_CPU_STREAM");
  setenv("DEEPCOMPILE_LOG", "", 1);
  EXPECT_EQ(Environment::read().cpu_stream, "auto");
  EXPECT_EQ(Environment::read().log, "warning");
}

TEST(Environment, AnUnknownValueIsAnErrorThatNamesVariableValueAndChoices) {
  setenv("DEEPCOMPILE_CPU_STREAM", "thread", 1);
  try {
    Environment::read();
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "environment variable DEEPCOMPILE_CPU_STREAM='thread': expected one of auto, inline, worker");
  }
  unsetenv("DEEPCOMPILE_CPU_STREAM");
}

TEST(Environment, SizesAreNumbersOfBytes) {
  EXPECT_EQ(Environment::read().shm_chunk_bytes, -1);
  setenv("DEEPCOMPILE_SHM_CHUNK_BYTES", "65536", 1);
  EXPECT_EQ(Environment::read().shm_chunk_bytes, 65536);
  for (const char* wrong : {"64k", "-1", "x"}) {
    setenv("DEEPCOMPILE_SHM_CHUNK_BYTES", wrong, 1);
    EXPECT_THROW(Environment::read(), Error) << wrong;
  }
  unsetenv("DEEPCOMPILE_SHM_CHUNK_BYTES");
}

}  // namespace
}  // namespace dc
