#include "deepcompile/plan/command.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

namespace dc::plan {
namespace {

// A folder of its own, gone at the end.
class Folder {
 public:
  Folder() : path_(std::filesystem::temp_directory_path() / ("plan_command_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name) << text;
    return (path_ / name).string();
  }
  std::string path(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

std::string readAll(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(Command, HelpNamesEveryOptionAndExitCode) {
  const CommandResult result = runCommand({"--help"});
  EXPECT_EQ(result.status, kDone);
  for (const char* word : {"plan GRAPH", "--machine", "--budget", "--strategy", "--explain", "--trace", "--html",
                           "--compare", "--accumulate", "Exit status"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word;
  }
}

TEST(Command, PlansAFileOnAMachineFile) {
  const Folder folder;
  const std::string graph = folder.write("g",
                                         "world 2\nparam a bytes=100\nnode f compute time=1us uses=a\nnode b compute "
                                         "time=1us uses=a grads=a phase=backward\n"
                                         "node u optimizer time=1us updates=a\n");
  const std::string machine = folder.write("m", "machine m\nbudget 1KiB\ngather 100:5us\nreduce 100:5us\n");
  const CommandResult result =
      runCommand({"plan", graph, "--machine", machine, "--strategy=planned", "--trace", folder.path("t")});
  ASSERT_EQ(result.status, kDone) << result.error;
  EXPECT_NE(result.out.find("gather g0 a"), std::string::npos) << result.out;
  EXPECT_NE(readAll(folder.path("t")).find("\"gather channel\""), std::string::npos);
}

TEST(Command, WritesTheExplanationAsOnePageWithAPictureAndNothingFromOutside) {
  const Folder folder;
  const CommandResult result = runCommand({"simulate", "--model", "gpt2-small", "--machine", "8xa100", "--accumulate",
                                           "80", "--strategy", "on_demand", "--html", folder.path("h")});
  ASSERT_EQ(result.status, kDone) << result.error;
  const std::string page = readAll(folder.path("h"));
  for (const char* part : {"<svg", "gather channel", "Memory at its peak", "on demand: nothing is prefetched",
                           "class=\"wait\"", "</html>"}) {
    EXPECT_NE(page.find(part), std::string::npos) << part;
  }
  for (const char* part : {"http", "<script", "src=", "href="}) {
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  }
  EXPECT_LT(page.size(), 1000000) << "10,000 nodes must not make a page that no one can open";
}

TEST(Command, NamesInThePageAreEscaped) {
  const Folder folder;
  const std::string graph =
      folder.write("g", "graph <b>&\nworld 2\nparam <i> bytes=100\nnode n<u>\" compute time=1us uses=<i>\n");
  const CommandResult result = runCommand({"plan", graph, "--strategy", "on_demand", "--html", folder.path("h")});
  ASSERT_EQ(result.status, kDone) << result.error;
  const std::string page = readAll(folder.path("h"));
  EXPECT_NE(page.find("&lt;b&gt;&amp;"), std::string::npos);
  EXPECT_NE(page.find("n&lt;u&gt;&quot;"), std::string::npos);
  EXPECT_EQ(page.find("<i>"), std::string::npos);
}

TEST(Command, ABudgetInPercentIsRelativeToTheLeastThatFits) {
  const CommandResult tight =
      runCommand({"simulate", "--model", "tiny-llama", "--machine", "2xcpu", "--budget", "10%"});
  EXPECT_EQ(tight.status, kDone) << tight.error;
  const CommandResult wrong = runCommand({"simulate", "--model", "tiny-llama", "--budget", "ten%"});
  EXPECT_EQ(wrong.status, kBadUsage);
}

TEST(Command, ComparesAllStrategies) {
  const CommandResult result = runCommand({"simulate", "--model", "tiny-llama", "--machine", "2xcpu", "--compare"});
  ASSERT_EQ(result.status, kDone) << result.error;
  for (const char* name : {"on_demand", "per_block", "published", "planned", "bound"}) {
    EXPECT_NE(result.out.find(name), std::string::npos) << name;
  }
}

TEST(Command, AnImpossibleBudgetNamesTheLeastThatWouldDoAndThatIsTrue) {
  const CommandResult refused = runCommand(
      {"simulate", "--model", "gpt2-small", "--machine", "8xa100", "--strategy", "planned", "--budget", "100MB"});
  ASSERT_EQ(refused.status, kDoesNotFit) << refused.error;
  const std::string marker = "at least ";
  const std::size_t at = refused.error.find(marker);
  ASSERT_NE(at, std::string::npos) << refused.error;
  const std::string least = std::to_string(std::stoll(refused.error.substr(at + marker.size())));
  EXPECT_EQ(runCommand({"simulate", "--model", "gpt2-small", "--machine", "8xa100", "--strategy", "planned", "--budget",
                        least})
                .status,
            kDone);
}

}  // namespace
}  // namespace dc::plan
