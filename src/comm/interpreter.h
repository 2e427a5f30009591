// Python's lock, for a library that does not know Python: who waits for something that other threads do, which may run
// Python, waits without it.
#pragma once

namespace dc {

// How it is let go of and taken back. `release` returns null where this thread does not hold it.
struct Interpreter {
  void* (*release)() = nullptr;
  void (*take)(void* released) = nullptr;
};

// By the Python module. `interpreter` must live as long as the process.
void setInterpreter(const Interpreter& interpreter);

// While it lives this thread does not hold the interpreter. Without Python it does nothing.
class InterpreterReleased {
 public:
  InterpreterReleased();
  ~InterpreterReleased();
  InterpreterReleased(const InterpreterReleased&) = delete;
  InterpreterReleased& operator=(const InterpreterReleased&) = delete;

 private:
  void* const released_;
};

}  // namespace dc
