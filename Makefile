# make help says what there is. Everything happens in .venv; PYTHON chooses the interpreter to make it.

PYTHON ?= python3
DEMO_OUTPUT ?= demo_output
DTYPE ?=
DEMO_ARGS ?=
PYTEST_ARGS ?= -q -n 2
GPU_ARGS ?=
MUTANTS_ARGS ?=
# Where no GPU says which it is, the three that the kernels are written for.
CUDA_ARCHITECTURES ?= $(if $(shell nvidia-smi -L 2>/dev/null),native,80-real;90a-real;100-real)
NVCC ?= nvcc

BIN := .venv/bin
CONSTRAINTS := build_scripts/constraints.txt
READY := .venv/.ready
CUDA_CHECKS := .venv/.cuda-checks
NATIVE := CMakeLists.txt $(wildcard plugins/common/* plugins/cpu/* plugins/include/dustin/*)
SOURCES := $(wildcard $(foreach d,plugins/common plugins/cpu plugins/cuda plugins/tensorrt tests/native tests/cuda \
  tests/tensorrt,$d/*.cpp $d/*.h $d/*.cu $d/*.cuh) \
  plugins/include/dustin/*.h)
COMPILER := $(shell for c in $${CXX:-c++ g++ clang++}; do command -v $$c && break; done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-reference emulated mutants sanitize cuda plugins cuda-check tensorrt-check gpu gpu-dry lint clean

help: ## Say what there is (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with the pinned packages, and build the native kernels

# pip hands the environment's constraints, not those of its command line, to what builds the kernels;
# the name it reads them from depends on its version.
$(READY) $(CUDA_CHECKS): export PIP_CONSTRAINT := $(abspath $(CONSTRAINTS))
$(READY) $(CUDA_CHECKS): export PIP_BUILD_CONSTRAINT := $(abspath $(CONSTRAINTS))
$(READY) $(CUDA_CHECKS): export DUSTIN_REQUIRE_NATIVE := $(if $(COMPILER),1,0)
$(READY): pyproject.toml $(CONSTRAINTS) $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is missing or older than 3.10; try: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@[ -n "$(COMPILER)" ] || echo "No C++ compiler: the reference will run instead of native kernels"
	@echo "Making .venv with the pinned packages (at first a few minutes, most of it torch)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(READY) ## Run the demo on a real model (DTYPE=float32, DEMO_OUTPUT=folder, DEMO_ARGS=more)
	@$(BIN)/dustin-trt demo --output $(DEMO_OUTPUT) $(if $(DTYPE),--dtype $(DTYPE)) $(DEMO_ARGS)

test: $(READY) $(if $(COMPILER),emulated) ## Fetch the test model and text, then run the tests (PYTEST_ARGS="-q --durations=10")
	@$(BIN)/python -m dustin_trt.evaluation.assets
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-reference: $(READY) ## Run models and decoding loop once more on torch alone, without native kernels
	@DUSTIN_CPU_ISA=reference $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not model" --ignore tests/runtime/test_graphs.py tests/models tests/runtime

emulated: export PATH := $(CURDIR)/$(BIN):$(PATH)
emulated: $(READY) ## Build the CUDA kernels for the host and run them there, in every order of threads
	@cmake -S . -B build/host -G Ninja -DDUSTIN_EMULATED=ON >/dev/null
	@cmake --build build/host --target emulated -- --quiet
	@build/host/tests/cuda/layout_probe
	@build/host/tests/cuda/test_cuda
	@if [ -x build/host/tests/tensorrt/test_plugins ]; then build/host/tests/tensorrt/test_plugins; \
	  else echo "Without TensorRT's headers (TENSORRT_ROOT=folder): no plugins"; fi

mutants: $(READY) ## Break the emulated CUDA kernels in every way listed: tests must catch each
	@$(BIN)/python -m tests.cuda.mutate $(MUTANTS_ARGS)

sanitize: export PATH := $(CURDIR)/$(BIN):$(PATH)
sanitize: $(READY) ## Run the native tests under the address and undefined-behaviour sanitizers
	@[ -n "$(COMPILER)" ] || { \
	  echo "error: make sanitize needs a C++ compiler; on Debian or Ubuntu: apt install g++" >&2; exit 1; }
	@cmake -S . -B build/sanitize -G Ninja -DDUSTIN_NATIVE_TESTS=ON -DDUSTIN_EMULATED=ON \
	  -DDUSTIN_SANITIZE=address,undefined >/dev/null
	@cmake --build build/sanitize -- --quiet
	@build/sanitize/tests/native/test_kernels
	@build/sanitize/tests/cuda/test_cuda 3
	@[ ! -x build/sanitize/tests/tensorrt/test_plugins ] || build/sanitize/tests/tensorrt/test_plugins

cuda plugins: export PATH := $(CURDIR)/$(BIN):$(PATH)
cuda: $(READY) ## Build libdustin_cuda.so (CUDA_ARCHITECTURES="80-real;90a-real", default this GPU; NVCC=nvcc)
	@$(call build_with_nvcc,dustin_cuda,OFF)

plugins: $(READY) ## Build libdustin_trt_plugins.so, likewise, over TensorRT's headers (TENSORRT_ROOT=folder)
	@$(call build_with_nvcc,dustin_trt_plugins,ON)

# A target, and whether it needs TensorRT's headers.
define build_with_nvcc
command -v $(NVCC) >/dev/null || { \
  echo "error: $(NVCC) is not on PATH; install CUDA 12.8 or later, or say NVCC=/usr/local/cuda/bin/nvcc" >&2; exit 1; } && \
cmake -S . -B build/cuda -G Ninja -DDUSTIN_CUDA=ON -DDUSTIN_TENSORRT=$(2) \
  -DCMAKE_CUDA_COMPILER="$$(command -v $(NVCC))" -DDUSTIN_CUDA_ARCHITECTURES="$(CUDA_ARCHITECTURES)" >/dev/null && \
cmake --build build/cuda --target $(1) -- --quiet
endef

cuda-check: $(CUDA_CHECKS) ## Compile the CUDA kernels with the packaged nvcc and check their machine code
	@$(BIN)/python -m tests.cuda.machine_code
	@DUSTIN_CUDA_CHECKS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) tests/cuda/test_machine_code.py

$(CUDA_CHECKS): $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[cuda-checks]'
	@touch $@

tensorrt-check: plugins ## Build engines with TensorRT-RTX, which takes no GPU, and the real plugins
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[tensorrt-rtx]'
	@$(BIN)/python -m dustin_trt.evaluation.assets
	@$(BIN)/python -m pytest $(PYTEST_ARGS) tests/build/test_tensorrt_rtx.py tests/tensorrt

# Neither makes .venv: a GPU machine runs this on the Python that has its torch, without network.
gpu: ## On a machine with an NVIDIA GPU: build, test, measure, write benchmarks/results (PYTHON=python3)
	@PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

gpu-dry: $(READY) ## Rehearse make gpu on CPU tensors at tiny sizes, with emulated kernels where built
	@PYTHONPATH=.:$$PYTHONPATH $(BIN)/python -m benchmarks.gpu --rehearse $(GPU_ARGS)

lint: $(READY) ## Check style, formatting, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/clang-format --dry-run -Werror $(SOURCES)

clean: ## Remove .venv, builds, caches and demo output (downloaded assets stay)
	@rm -rf .venv build dustin_trt/lib $(DEMO_OUTPUT) .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
