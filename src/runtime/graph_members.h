// The parameters of one graph.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "deepcompile/runtime/ids.h"
#include "deepcompile/runtime/registry.h"

namespace dc {

class GraphMembers {
 public:
  // `place`: the rank, for messages.
  GraphMembers(std::shared_ptr<DSParamRegistry> registry, std::vector<std::int64_t> ids, std::string place);

  const std::vector<std::int64_t>& ids() const { return ids_; }
  bool contains(std::int64_t id) const { return set_.contains(id); }
  // Throws unless `id` is one of this graph's.
  const DSParam& at(std::int64_t id) const {
    if (!contains(id)) [[unlikely]] {
      refuse(id);
    }
    return registry_->getParam(id);
  }

 private:
  [[noreturn]] void refuse(std::int64_t id) const;

  const std::shared_ptr<DSParamRegistry> registry_;
  const std::vector<std::int64_t> ids_;
  const IdSet set_;
  const std::string place_;
};

}  // namespace dc
