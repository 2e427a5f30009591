#include "deepcompile/shm/tuning.h"
#include "deepcompile/shm/group.h"
namespace dc::shm {
Tuning measureTuning(Group& group) { return group.tuning(); }
}
