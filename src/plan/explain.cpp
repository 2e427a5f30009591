#include "deepcompile/plan/explain.h"

#include "deepcompile/plan/text.h"

namespace dc::plan {

std::string explain(const Reason& reason) {
  const std::int64_t a = reason.a;
  const std::int64_t b = reason.b;
  switch (reason.why) {
    case Why::Program:
      return "";
    case Why::OnDemand:
      return "on demand: nothing is prefetched";
    case Why::NextBlock:
      return "prefetched during the block before";
    case Why::Hoisted:
      return concat("hoisted until memory was full or enough was pending (", roundBytes(a), " pending)");
    case Why::Hidden:
      return concat("as late as is still hidden: ", roundNanos(a), " of gather under ", roundNanos(b), " of compute");
    case Why::Exposed:
      return concat("cannot be hidden: ", roundNanos(a), " of gather, ", roundNanos(b), " of compute before its use");
    case Why::MemoryBound:
      return concat("would start earlier, but ", roundBytes(a), " did not fit; ", roundNanos(b),
                    " of compute before its use");
    case Why::NotWorthIt:
      return concat("starting earlier would take ", roundBytes(a), " more and gain too little of the step; ",
                    roundNanos(b), " of compute before its use");
    case Why::NeededNow:
      return "";
    case Why::LastUse:
      return concat("after its last use, gives back ", roundBytes(a));
    case Why::NotKept:
      return concat("gives back ", roundBytes(a), "; gathered again for its next use, ", b, " nodes later");
    case Why::Kept:
      return concat("stays gathered (", roundBytes(a), ")");
    case Why::BucketFull:
      return concat("the bucket is full: ", roundBytes(a), " saturate the link");
    case Why::BucketEnd:
      return concat("nothing more to add to the bucket of ", roundBytes(a));
    case Why::BesideUpdates:
      return concat(roundBytes(a), " held back, to be reduced beside updates that do not need it");
    case Why::Sunk:
      return "put where it is expected to be done";
    case Why::ForMemory:
      return "gives back memory that the next node needs";
    case Why::LowersPeak:
      return "keeps the peak low, at next to no time";
    case Why::BeforeUpdate:
      return "the optimizer needs it";
    case Why::OverBudget:
      return concat("the step does not fit without it: ", roundBytes(a));
    case Why::MakesRoom:
      return concat("makes room for ", roundBytes(a), " that stay gathered");
    case Why::Returned:
      return "back to where the step began";
    case Why::AfterUpdate:
      return "refreshed after its update";
  }
  return "";
}

}  // namespace dc::plan
