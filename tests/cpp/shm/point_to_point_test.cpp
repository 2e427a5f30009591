#include "deepcompile/shm/point_to_point.h"

#include <future>
#include <random>

#include <gtest/gtest.h>

#include "deepcompile/shm/collectives.h"

#include "shm_ranks.h"

namespace dc::shm::testing {
namespace {

GroupOptions options(int seconds = 60) {
  GroupOptions options;
  options.timeout = std::chrono::seconds(seconds);
  options.tuning = Tuning{};
  return options;
}

// The messenger's answer as something to wait for.
struct Ticket {
  std::shared_ptr<std::promise<int>> promise = std::make_shared<std::promise<int>>();
  Messenger::Done done() const {
    return [promise = promise](const std::exception_ptr& error, int source) {
      error ? promise->set_exception(error) : promise->set_value(source);
    };
  }
  int wait() { return promise->get_future().get(); }
};

std::vector<std::byte> message(int from, int to, std::uint64_t tag, std::int64_t bytes) {
  std::vector<std::byte> data(static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<std::byte>(static_cast<std::size_t>(from) * 31 + static_cast<std::size_t>(to) * 17 + tag * 7 +
                                     i * 13);
  }
  return data;
}

Run runOf(std::vector<std::byte>& data) { return {data.data(), static_cast<std::int64_t>(data.size())}; }

TEST(PointToPoint, EverybodySendsToEverybodyBeforeAnyReceives) {
  constexpr int kRanks = 4;
  EXPECT_EQ(onProcessGroup(kRanks, options(),
                           [](Group& group) {
                             Messenger messenger(group);
                             std::mt19937 random(7);  // the same on all ranks
                             const std::int64_t sizes[] = {0, 1, 31, 32, 33, 5000, 300'000, 1'500'000};
                             std::list<std::vector<std::byte>> memory;
                             std::vector<Ticket> tickets;
                             const int me = group.rank();
                             for (std::uint64_t tag = 0; tag < 8; ++tag) {
                               for (int peer = 0; peer < kRanks; ++peer) {
                                 memory.push_back(message(me, peer, tag, sizes[tag]));
                                 messenger.send(runOf(memory.back()), peer, tag, tickets.emplace_back().done());
                               }
                             }
                             // Received in another order than sent.
                             std::vector<std::tuple<int, std::uint64_t, std::vector<std::byte>*>> arrived;
                             for (std::uint64_t tag = 8; tag-- > 0;) {
                               for (int peer = kRanks; peer-- > 0;) {
                                 memory.emplace_back(static_cast<std::size_t>(sizes[tag]));
                                 arrived.emplace_back(peer, tag, &memory.back());
                                 messenger.receive(runOf(memory.back()), peer, tag, tickets.emplace_back().done());
                               }
                             }
                             for (Ticket& ticket : tickets) {
                               ticket.wait();
                             }
                             for (const auto& [peer, tag, data] : arrived) {
                               check(*data == message(peer, me, tag, sizes[tag]), "a wrong message");
                             }
                           }),
            noErrors(kRanks));
}

TEST(PointToPoint, MessagesOfOneTagArriveInOrder) {
  EXPECT_EQ(onThreadGroup(2, options(),
                          [](Group& group) {
                            Messenger messenger(group);
                            std::vector<std::int64_t> numbers(3000);
                            std::vector<Ticket> tickets(numbers.size());
                            for (std::size_t i = 0; i < numbers.size(); ++i) {
                              numbers[i] = group.rank() == 0 ? static_cast<std::int64_t>(i) : -1;
                              const auto one = run(&numbers[i], sizeof(numbers[i]));
                              group.rank() == 0 ? messenger.send(one, 1, 5, tickets[i].done())
                                                : messenger.receive(one, 0, 5, tickets[i].done());
                            }
                            for (std::size_t i = 0; i < numbers.size(); ++i) {
                              tickets[i].wait();
                              check(numbers[i] == static_cast<std::int64_t>(i), "out of order");
                            }
                          }),
            noErrors(2));
}

TEST(PointToPoint, AnySourceSaysWhoSent) {
  EXPECT_EQ(onThreadGroup(3, options(),
                          [](Group& group) {
                            Messenger messenger(group);
                            std::vector<std::int32_t> data = {group.rank(), group.rank()};
                            std::vector<Ticket> tickets(2);
                            if (group.rank() != 0) {
                              messenger.send(run(data.data(), 4), 0, 1, tickets[0].done());
                              tickets[0].wait();
                              return;
                            }
                            int sum = 0;
                            for (int i = 0; i < 2; ++i) {
                              messenger.receive(run(&data[static_cast<std::size_t>(i)], 4), kAnySource, 1,
                                                tickets[static_cast<std::size_t>(i)].done());
                              const int source = tickets[static_cast<std::size_t>(i)].wait();
                              check(data[static_cast<std::size_t>(i)] == source, "another rank's message");
                              sum += source;
                            }
                            check(sum == 3, "not from both");
                          }),
            noErrors(3));
}

TEST(PointToPoint, AReceiveThatNobodyServesEndsAtItsDeadline) {
  const auto started = Clock::now();
  const Errors errors = onProcessGroup(2, options(1), [](Group& group) {
    Messenger messenger(group);
    std::int32_t number = 0;
    Ticket ticket;
    messenger.receive(run(&number, 4), 1 - group.rank(), 9, ticket.done());
    ticket.wait();
  });
  EXPECT_LT(Clock::now() - started, std::chrono::seconds(5));
  EXPECT_NE(errors[0].find("receive of 4 bytes, tag 9"), std::string::npos) << errors[0];
}

TEST(PointToPoint, AMessageOfAnotherSizeIsAnErrorThatNamesBoth) {
  const Errors errors = onThreadGroup(2, options(), [](Group& group) {
    Messenger messenger(group);
    std::int64_t number = 0;
    Ticket ticket;
    group.rank() == 0 ? messenger.send(run(&number, 8), 1, 0, ticket.done())
                      : messenger.receive(run(&number, 4), 0, 0, ticket.done());
    ticket.wait();
  });
  EXPECT_NE(errors[1].find("receives 4 bytes with tag 0 from rank 0, which sends 8"), std::string::npos) << errors[1];
}

TEST(PointToPoint, ARankThatLeavesEndsWhatWaitsForIt) {
  const Errors errors = onProcessGroup(2, options(), [](Group& group) {
    if (group.rank() == 1) {
      return;
    }
    Messenger messenger(group);
    std::int64_t number = 0;
    Ticket ticket;
    messenger.receive(run(&number, 8), 1, 0, ticket.done());
    ticket.wait();
  });
  EXPECT_NE(errors[0].find("receive from rank 1"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("will not come"), std::string::npos) << errors[0];
}

TEST(PointToPoint, MessagesThatCameEarlyKeepTheirOrder) {
  EXPECT_EQ(onThreadGroup(2, options(),
                          [](Group& group) {
                            Messenger messenger(group);
                            std::vector<std::int64_t> numbers(3000, -1);
                            std::vector<Ticket> tickets(numbers.size());
                            std::int64_t last = 0;
                            Ticket end;
                            if (group.rank() == 1) {
                              // Keeps the messenger looking: so most messages arrive before they are asked for.
                              messenger.receive(run(&last, 8), 0, 9, end.done());
                            }
                            for (std::size_t i = 0; i < numbers.size(); ++i) {
                              const auto one = run(&numbers[i], sizeof(numbers[i]));
                              if (group.rank() == 0) {
                                numbers[i] = static_cast<std::int64_t>(i);
                                messenger.send(one, 1, 5, tickets[i].done());
                              } else {
                                messenger.receive(one, 0, 5, tickets[i].done());
                              }
                              tickets[i].wait();
                              check(numbers[i] == static_cast<std::int64_t>(i), "out of order");
                            }
                            if (group.rank() == 0) {
                              messenger.send(run(&last, 8), 1, 9, end.done());
                            }
                            end.wait();
                          }),
            noErrors(2));
}

TEST(PointToPoint, ARankThatEndsInTheMiddleOfAMessageEndsItsReceive) {
  const auto started = Clock::now();
  const Errors errors = onProcessGroup(2, options(), [](Group& group) {
    Messenger messenger(group);
    std::vector<std::byte> data(1 << 20);  // more than a mailbox holds
    Ticket ticket;
    if (group.rank() == 1) {
      messenger.send(runOf(data), 0, 0, ticket.done());
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      ::_exit(0);
    }
    while (!group.gone(1)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    messenger.receive(runOf(data), 1, 0, ticket.done());
    ticket.wait();
  });
  EXPECT_LT(Clock::now() - started, std::chrono::seconds(10));
  EXPECT_NE(errors[0].find("receive from rank 1"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("will not come"), std::string::npos) << errors[0];
}

TEST(PointToPoint, AMessageThatStopsOnItsWayEndsAtTheDeadline) {
  const Errors errors = onProcessGroup(2, options(1), [](Group& group) {
    std::vector<std::byte> data(1 << 20);
    Ticket ticket;
    if (group.rank() == 1) {
      {
        Messenger messenger(group);
        messenger.send(runOf(data), 0, 0, ticket.done());
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
      barrier(group);
      std::this_thread::sleep_for(std::chrono::milliseconds(2000));  // alive, and silent
      return;
    }
    barrier(group);
    Messenger messenger(group);
    messenger.receive(runOf(data), 1, 0, ticket.done());
    ticket.wait();
  });
  EXPECT_NE(errors[0].find("receive of 1048576 bytes, tag 0"), std::string::npos) << errors[0];
}

TEST(PointToPoint, ACallbackMayEndItsOwnMessenger) {
  std::vector<std::shared_ptr<Group>> groups;
  for (auto& group : Group::ofThreads(2, options())) {
    groups.emplace_back(std::move(group));
  }
  auto messenger = std::make_unique<Messenger>(groups[0]);
  Messenger other(groups[1]);
  std::vector<std::byte> data = message(0, 1, 0, 1000);
  std::vector<std::byte> never(8);
  Ticket pending;
  std::promise<bool> ended;
  // Everything that the thread still needs is its own when the callback drops the rest.
  messenger->receive(runOf(never), 1, 7, pending.done());
  messenger->send(runOf(data), 1, 0, [&](const std::exception_ptr&, int) {
    messenger.reset();
    groups[0].reset();
    ended.set_value(true);
  });
  EXPECT_TRUE(ended.get_future().get());
  EXPECT_NE(errorOf([&] { pending.wait(); }).find("was closed"), std::string::npos);
}

}  // namespace
}  // namespace dc::shm::testing
