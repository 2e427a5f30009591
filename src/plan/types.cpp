#include "deepcompile/plan/types.h"

#include <array>

namespace dc::plan {
namespace {

constexpr std::array<std::string_view, 8> kKinds = {"compute", "gather",  "wait",   "release",
                                                    "reduce",  "offload", "reload", "optimizer"};
constexpr std::array<std::string_view, kResources> kResourceNames = {"compute", "gather channel", "reduce channel",
                                                                     "host to device", "device to host"};
constexpr std::array<std::string_view, 3> kPhases = {"forward", "backward", "update"};
constexpr std::array<std::string_view, 4> kDtypes = {"f32", "f16", "bf16", "f8"};

template <typename Enum, std::size_t N>
std::optional<Enum> find(const std::array<std::string_view, N>& names, std::string_view name) {
  for (std::size_t i = 0; i < N; ++i) {
    if (names[i] == name) {
      return static_cast<Enum>(i);
    }
  }
  return std::nullopt;
}

}  // namespace

std::string_view name(NodeKind kind) { return kKinds[static_cast<std::size_t>(kind)]; }
std::string_view name(Resource resource) { return kResourceNames[static_cast<std::size_t>(resource)]; }
std::string_view name(Phase phase) { return kPhases[static_cast<std::size_t>(phase)]; }
std::string_view name(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)]; }

std::optional<NodeKind> nodeKind(std::string_view name) { return find<NodeKind>(kKinds, name); }
std::optional<Phase> phase(std::string_view name) { return find<Phase>(kPhases, name); }
std::optional<Dtype> dtype(std::string_view name) { return find<Dtype>(kDtypes, name); }

Bytes elementBytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::F32:
      return 4;
    case Dtype::F8:
      return 1;
    default:
      return 2;
  }
}

}  // namespace dc::plan
