#include "deepcompile/runtime/watchdog.h"

#include <future>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "deepcompile/base/error.h"

namespace dc {
namespace {

using Said = std::pair<std::string, std::string>;

// Work that ends when it is told to.
class OpenEnd final : public EventState {
 public:
  bool passed() const override { return ended_.load(); }
  void wait(Deadline) const override {}
  void end() { ended_.store(true); }

 private:
  std::atomic<bool> ended_{false};
};

struct Watching {
  std::promise<Said> said;
  std::atomic<bool> broken{false};
  double timeout = 0.2;
  std::unique_ptr<Watchdog> watchdog = std::make_unique<Watchdog>(Watchdog::Callbacks{
      .timeout = [this] { return timeout; },
      .broken = [this]() -> std::optional<std::string> {
        return broken ? std::optional<std::string>("a link is down") : std::nullopt;
      },
      .stuck = [this](const std::string& what, const std::string& why) { said.set_value({what, why}); },
  });
};

TEST(Watchdog, WorkThatDoesNotEndIsReportedWithItsNameAfterItsDeadline) {
  Watching watching;
  const auto started = Clock::now();
  watching.watchdog->watch(Event(std::make_shared<OpenEnd>()), [] { return "gathering parameter 3"; });
  auto said = watching.said.get_future();
  ASSERT_EQ(said.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_GE(Clock::now() - started, std::chrono::milliseconds(200));
  EXPECT_EQ(said.get(), Said("gathering parameter 3", "it did not end within 0.2 seconds"));
}

TEST(Watchdog, WhatChannelsReportIsSaidBeforeTheDeadline) {
  Watching watching;
  watching.timeout = 1000;
  watching.watchdog->watch(Event(std::make_shared<OpenEnd>()), [] { return "reducing"; });
  watching.broken = true;
  auto said = watching.said.get_future();
  ASSERT_EQ(said.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(said.get(), Said("reducing", "a link is down"));
}

TEST(Watchdog, WorkThatEndsInTimeIsForgottenAndLaterWorkIsWatched) {
  Watching watching;
  const auto first = std::make_shared<OpenEnd>();
  first->end();
  watching.watchdog->watch(Event(first), [] { return "the first"; });
  watching.watchdog->watch(Event(std::make_shared<OpenEnd>()), [] { return "the second"; });
  auto said = watching.said.get_future();
  ASSERT_EQ(said.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(said.get().first, "the second");
}

// Of a device that has failed.
class Failed final : public EventState {
 public:
  bool passed() const override { fail("an illegal access"); }
  void wait(Deadline) const override {}
};

TEST(Watchdog, ADeviceThatFailsIsReportedAndDoesNotEndTheProcess) {
  Watching watching;
  watching.timeout = 1000;
  watching.watchdog->watch(Event(std::make_shared<Failed>()), [] { return "reducing"; });
  auto said = watching.said.get_future();
  ASSERT_EQ(said.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  EXPECT_EQ(said.get(), Said("reducing", "an illegal access"));
}

TEST(Watchdog, NothingIsSaidAfterStop) {
  Watching watching;
  watching.timeout = 1;
  watching.watchdog->watch(Event(std::make_shared<OpenEnd>()), [] { return "never said"; });
  watching.watchdog->stop();
  EXPECT_EQ(watching.said.get_future().wait_for(std::chrono::milliseconds(1200)), std::future_status::timeout);
}

}  // namespace
}  // namespace dc
