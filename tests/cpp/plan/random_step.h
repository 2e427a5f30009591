// Random steps with everything that a plan must respect: views of parameters and of buffers, a
// frozen and a persistent parameter, tied uses, states, several micro-batches.
#pragma once

#include <random>
#include <string>

#include "deepcompile/base/error.h"
#include "deepcompile/plan/graph_text.h"

namespace dc::plan {

inline StepGraph randomStep(std::mt19937& random, int stage) {
  const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
  const int layers = pick(3, 6);
  const int micros = pick(1, 3);
  std::string text = concat("graph random\nworld 4\nstage ", stage, "\n");
  for (int l = 0; l < layers; ++l) {
    const int bytes = 400 * pick(1, 9);
    text += concat("param w", l, " bytes=", bytes, " accum=", stage == 1 ? bytes : bytes / 4, " state=", bytes, "\n");
  }
  text += "param tied bytes=2000 accum=500 state=1000\nparam frozen bytes=1200 frozen\n";
  text += "param norm bytes=40 state=40 persistent\nbuffer wt alias=w1\n";
  std::string nodes;
  for (int m = 0; m < micros; ++m) {
    for (int l = 0; l < layers; ++l) {
      text += concat("buffer a", m, ".", l, " bytes=", 100 * pick(1, 30), "\nbuffer v", m, ".", l, " alias=a", m, ".",
                     l, "\n");
      nodes += concat("node f", m, ".", l, " compute time=", pick(1, 30), "us micro=", m, " block=", l,
                      " uses=", l == 1 ? "norm" : concat("w", l, l == 0 ? ",tied" : ""), l == 2 ? ",frozen" : "",
                      " makes=a", m, ".", l,
                      l == 1  ? concat(" reads=wt,a", m, ".", l - 1)
                      : l > 0 ? concat(" reads=v", m, ".", l - 1)
                              : "",
                      "\n");
    }
    for (int l = layers - 1; l >= 0; --l) {
      nodes += concat("node b", m, ".", l, " compute time=", pick(1, 40), "us phase=backward micro=", m, " block=", l,
                      " uses=", l == 1 ? "norm" : concat("w", l), l == 2 ? ",frozen" : "",
                      l == layers - 1 ? ",tied" : "", " grads=w", l, l == 1 ? ",norm" : "",
                      l == layers - 1 || l == 0 ? ",tied" : "", " reads=v", m, ".", l, l == 1 ? ",wt" : "", "\n");
    }
  }
  for (int l = 0; l < layers; ++l) {
    nodes += concat("node u", l, " optimizer time=2us micro=", micros - 1, " updates=w", l, l == 0 ? ",tied,norm" : "",
                    "\n");
  }
  return parseGraph(text + nodes);
}

}  // namespace dc::plan
