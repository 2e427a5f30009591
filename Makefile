# The front door. `make demo` and `make test` set up everything they need; the second run starts in seconds.
#
#   make demo       train a small Llama under ZeRO-3 on two processes, beside the same model in one
#   make test       C++ and Python tests; make test-all also those that take minutes
#   make test-cuda  the tests on a GPU: those of CUDA alone, and those of the runtime on its tensors
#   make build      the libraries, in place; PYTHON=python3 takes an interpreter that already has torch, without network;
#                   JOINED=ON takes several sources at once: quicker from nothing, slower after a change of one (the demo's
#                   way; JOINED=OFF goes back), WERROR=ON makes warnings errors
#   make bench      all benchmarks (QUICK=1: short runs); make peers installs what they compare with
#   make sanitize-cuda  the operators under compute-sanitizer, on a GPU
#   make sanitize   the C++ tests under the address, undefined-behaviour and thread sanitizers
#   make format     rewrite the sources in the project's style;  make lint checks it
#   make clean      remove what was built

BUILD := build/release
TORCH := torch==2.13.0

ifdef PYTHON
  SETUP :=
  SETUP_DEMO :=
else
  PYTHON := .venv/bin/python
  SETUP := .venv/ready
  SETUP_DEMO := .venv/ready-for-demo
endif

export PYTHONPATH := $(CURDIR)/python
# The package of clang-format has no command of its own beside the script.
CLANG_FORMAT = $(PYTHON) -c "from clang_format import clang_format; clang_format()"
PYTHON_SOURCES := python tests benchmarks examples cmake scripts/wheel
CMAKE_CONFIGURE = cmake -S . -G Ninja -DPython_EXECUTABLE=$$(realpath -s $$(command -v $(PYTHON))) -Wno-dev

.PHONY: all demo libraries test test-all test-cuda sanitize-cuda test-cpp test-python build bench peers sanitize format lint clean

all: build

.venv/ready-for-demo: scripts/system-packages
	scripts/system-packages build
	python3 -m venv .venv
	.venv/bin/python -m pip install -q $(TORCH) $$(grep -E '^(numpy|rich)==' requirements-dev.txt)
	touch $@

.venv/ready: .venv/ready-for-demo requirements-dev.txt
	scripts/system-packages
	.venv/bin/python -m pip install -q -r requirements-dev.txt
	touch $@

# JOINED and WERROR stay as they were where they are not given.
build: $(SETUP)
	$(CMAKE_CONFIGURE) -B $(BUILD) -DDEEPCOMPILE_IN_PLACE=ON -DDEEPCOMPILE_TESTS=ON -DDEEPCOMPILE_CUDA=ON --log-level=WARNING \
	  $(foreach option,JOINED WERROR,$(if $($(option)),-DDEEPCOMPILE_$(option)=$($(option))))
	cmake --build $(BUILD)
	scripts/importable $(PYTHON)

# What the demo needs and no more: no tests, and no CUDA parts where there is no GPU. A build that is there is brought up to date.
libraries: $(SETUP_DEMO)
	test -f $(BUILD)/build.ninja || $(CMAKE_CONFIGURE) -B $(BUILD) -DDEEPCOMPILE_IN_PLACE=ON -DDEEPCOMPILE_TESTS=OFF \
	  -DDEEPCOMPILE_CUDA=$(if $(wildcard /dev/nvidiactl /dev/dxg),ON,OFF) -DDEEPCOMPILE_JOINED=ON --log-level=WARNING
	cmake --build $(BUILD) --target libraries

test: test-cpp test-python

test-cpp: build
	ctest --test-dir $(BUILD) --output-on-failure -j 2

test-python: build
	$(PYTHON) -m pytest tests/python -q -m "not slow and not alone" -n 2 --dist worksteal
	$(PYTHON) -m pytest tests/python -q -m "alone and not slow"

test-all: test-cpp
	$(PYTHON) -m pip install -q $(TORCH) -r tests/requirements-transformers.txt
	$(PYTHON) -m pytest tests/python -q

# On a machine with a GPU; several ranks share it. What they need of NCCL and the driver: docs/cuda.md. All tests but those that
# say why they are of the CPU alone. WORKERS=10 runs ten at once (pytest-xdist), each with a multi-process service of its own.
test-cuda: export DEEPCOMPILE_TEST_DEVICE := cuda
test-cuda: build
	$(PYTHON) -m deepcompile doctor
	$(PYTHON) -m pytest tests/python -q -m "not slow and not alone" $(if $(WORKERS),-n $(WORKERS) --dist worksteal)
	$(PYTHON) -m pytest tests/python -q -m "alone and not slow" $(if $(WORKERS),-n 1)

sanitize-cuda: build
	for tool in memcheck racecheck; do compute-sanitizer --tool $$tool --error-exitcode 1 $(PYTHON) tests/python/cuda_operators.py || exit 1; done

demo: libraries
	$(PYTHON) examples/llama.py

bench: build
	for benchmark in $(filter-out $(addprefix benchmarks/,report.py results.py recorded_steps.py train_on_cuda.py),$(wildcard benchmarks/*.py)); do $(PYTHON) $$benchmark $(if $(QUICK),--quick) || exit 1; done

peers: $(SETUP)
	scripts/system-packages peers
	$(PYTHON) -m pip install -q -r benchmarks/requirements-peers.txt

sanitize: $(SETUP)
	scripts/sanitize $(PYTHON)

format: $(SETUP)
	git ls-files '*.h' '*.cpp' | xargs $(CLANG_FORMAT) -i
	$(PYTHON) -m ruff format $(PYTHON_SOURCES)
	$(PYTHON) -m ruff check --fix $(PYTHON_SOURCES)

lint: $(SETUP)
	git ls-files '*.h' '*.cpp' | xargs $(CLANG_FORMAT) --dry-run -Werror
	$(PYTHON) -m ruff format --check $(PYTHON_SOURCES)
	$(PYTHON) -m ruff check $(PYTHON_SOURCES)
	$(PYTHON) -m mypy python/deepcompile

clean:
	rm -rf build python/deepcompile/_built_for.py python/deepcompile/_C*.so python/deepcompile/_cuda*.so python/deepcompile/lib python/deepcompile/plan/_plan*.so
