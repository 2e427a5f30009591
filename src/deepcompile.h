// Everything that users of the C++ library need.
#pragma once

#include "deepcompile/base/error.h"
#include "deepcompile/base/text.h"
#include "deepcompile/comm/communicator.h"
#include "deepcompile/runtime/executor.h"
#include "deepcompile/runtime/graph_table.h"
#include "deepcompile/runtime/param.h"
#include "deepcompile/runtime/reduce_bucket.h"
#include "deepcompile/runtime/registry.h"
#include "deepcompile/runtime/runtime.h"
#include "deepcompile/runtime/stream.h"
#include "deepcompile/runtime/tensor_text.h"
#include "deepcompile/runtime/z1_executor.h"
#include "deepcompile/runtime/z2_executor.h"
#include "deepcompile/runtime/z3_executor.h"
