#include "deepcompile/runtime/agreement.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <numeric>
#include <sstream>
#include <vector>

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"

namespace dc {
namespace {

// FNV-1a, started from two points: 128 bits in all.
std::string hash(const std::string& text) {
  std::array<std::uint64_t, 2> state = {0xcbf29ce484222325ULL, 0x84222325cbf29ce4ULL};
  for (const char c : text) {
    for (std::uint64_t& s : state) {
      s = (s ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
    }
    state[1] ^= state[1] >> 29;
  }
  return std::string(reinterpret_cast<const char*>(state.data()), sizeof(state));
}

// One line per parameter and graph, without what may differ between ranks.
std::string describeRegistration(const DSParamRegistry& registry,
                                 const std::unordered_map<std::int64_t, std::shared_ptr<CustomOpExecutor>>& graphs) {
  std::vector<std::int64_t> ids = registry.getIds();
  std::sort(ids.begin(), ids.end());
  std::ostringstream out;
  for (const std::int64_t id : ids) {
    const DSParam& param = registry.getParam(id);
    out << param.describe() << (param.isPartitioned() ? " sharded" : " whole");
    if (param.isPartitioned()) {
      out << " in " << param.getOwners()[0].size() << (param.trainable() ? ", trainable" : ", frozen");
    } else if (!param.getGradBuffer().defined()) {
      out << ", frozen";
    }
    out << (param.isPersistent() ? ", persistent" : "") << ", reduced in " << param.getReduceDtype() << "\n";
  }
  const std::map<std::int64_t, std::shared_ptr<CustomOpExecutor>> sorted(graphs.begin(), graphs.end());
  for (const auto& [graph_id, executor] : sorted) {
    out << "graph " << graph_id << " of " << executor->stageName() << " with parameters ["
        << join_as_str(executor->getIds(), ", ") << "]";
    for (const std::int64_t id : executor->getIds()) {
      if (!registry.hasParam(id)) {
        out << ", of which " << id << " is not registered";
      }
    }
    out << "\n";
  }
  return out.str();
}

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    all.push_back(line);
  }
  return all;
}

// The text of most ranks; on a tie the lowest rank's.
const std::string& mostCommon(const std::vector<std::string>& texts) {
  const std::string* best = &texts[0];
  std::ptrdiff_t most = 0;
  for (const std::string& text : texts) {
    const std::ptrdiff_t count = std::count(texts.begin(), texts.end(), text);
    if (count > most) {
      most = count;
      best = &text;
    }
  }
  return *best;
}

// For every rank that differs from the majority, the first line that differs.
std::string accountOfDifferences(const std::vector<std::string>& texts) {
  const std::string& common = mostCommon(texts);
  const auto common_rank = std::find(texts.begin(), texts.end(), common) - texts.begin();
  const std::vector<std::string> expected = lines(common);
  const std::string nothing = "nothing";
  std::ostringstream out;
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (texts[r] == common) {
      continue;
    }
    const std::vector<std::string> found = lines(texts[r]);
    std::size_t i = 0;
    while (i < expected.size() && i < found.size() && expected[i] == found[i]) {
      ++i;
    }
    out << "\n  rank " << r << " has " << (i < found.size() ? found[i] : nothing) << "\n  where rank " << common_rank
        << " has " << (i < expected.size() ? expected[i] : nothing);
  }
  return out.str();
}

// Each rank's slice of each whole (ZeRO-1, 2) parameter, checked to be disjoint and to cover it.
void learnOwners(Communicator& comm, DSParamRegistry& registry, const std::vector<std::int64_t>& replicated) {
  std::vector<Slice> mine;
  for (const std::int64_t id : replicated) {
    const DSParam& param = registry.getParam(id);
    const std::int64_t numel = param.getGradBuffer().defined() ? param.getGradBuffer().numel() : 0;
    mine.push_back({param.getOffset(), param.getOffset() + numel});
  }
  const auto all = comm.exchange(std::string(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Slice)));
  for (std::size_t i = 0; i < replicated.size(); ++i) {
    DSParam& param = registry.getParam(replicated[i]);
    std::vector<Slice> owners(all.size());
    for (std::size_t r = 0; r < all.size(); ++r) {
      std::memcpy(&owners[r], all[r].data() + i * sizeof(Slice), sizeof(Slice));
      if (owners[r].size() == 0) {
        owners[r] = {0, 0};  // the offset of an empty slice does not matter
      }
    }
    std::vector<std::size_t> by_begin(owners.size());
    std::iota(by_begin.begin(), by_begin.end(), std::size_t{0});
    std::sort(by_begin.begin(), by_begin.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(owners[a].begin, owners[a].end) < std::pair(owners[b].begin, owners[b].end);
    });
    std::int64_t covered = 0;
    bool whole_covered = true;
    for (const std::size_t r : by_begin) {
      if (owners[r].size() > 0) {
        whole_covered = whole_covered && owners[r].begin == covered;
        covered = owners[r].end;
      }
    }
    const bool frozen = !param.getGradBuffer().defined() || (covered == 0 && param.numel() > 0);
    check(frozen || (whole_covered && covered == param.numel()), [&] {
      std::ostringstream out;
      for (std::size_t r = 0; r < owners.size(); ++r) {
        out << "\n  rank " << r << " owns [" << owners[r].begin << ", " << owners[r].end << ")";
      }
      return concat("the ranks' slices of the gradient of ", param.describe(), " must be disjoint and cover its ",
                    param.numel(), " elements:", out.str());
    });
    param.setOwners(std::move(owners));
    param.setTrainable(!frozen);
  }
}

}  // namespace

void agreeOnRegistration(Communicator& comm, DSParamRegistry& registry,
                         const std::unordered_map<std::int64_t, std::shared_ptr<CustomOpExecutor>>& graphs,
                         const std::string& facts) {
  const std::string mine = facts + describeRegistration(registry, graphs);
  const auto hashes = comm.exchange(hash(mine));
  if (std::any_of(hashes.begin(), hashes.end(), [&](const std::string& other) { return other != hashes[0]; })) {
    fail("the ranks have registered different parameters or graphs:", accountOfDifferences(comm.exchangeAny(mine)));
  }
  std::vector<std::int64_t> replicated;
  for (const std::int64_t id : registry.getIds()) {
    if (!registry.getParam(id).isPartitioned()) {
      replicated.push_back(id);
    }
  }
  if (!replicated.empty()) {
    std::sort(replicated.begin(), replicated.end());
    learnOwners(comm, registry, replicated);
  }
}

void agreeOnCollective(Communicator& comm, const std::string& what) {
  if (what.empty()) {
    return;
  }
  const auto hashes = comm.exchange(hash(what));
  if (std::any_of(hashes.begin(), hashes.end(), [&](const std::string& other) { return other != hashes[0]; })) {
    fail("the ranks are about to run different collectives:", accountOfDifferences(comm.exchangeAny(what + "\n")));
  }
}

}  // namespace dc
