# make demo      a model streams under a budget, beside the same model resident
# make test      the fast tests; make test-all runs what a change has to pass
# make help      the rest
#
# Each does its own set-up: a virtual environment in .venv, with torch, in which the extension is built.
# Packages come in the versions of constraints.txt, which `make lock` writes, and torch in that of TORCH.
#   TORCH='torch==2.12.0'    another torch; TORCH= VENV_FLAGS=--system-site-packages for the system's own
#   DYNSWAP_CUDA=0|1|auto    without CUDA, with it or fail, with it where there is a toolkit
#   DYNSWAP_WERROR=1         warnings are errors
#   DYNSWAP_UNITY=0          a translation unit for each file: slow from nothing, quick after a change to one

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
VENV_FLAGS ?=
DOCS_VENV ?= .venv_docs
WHEEL_VENV ?= build/wheel_venv
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
DYNSWAP_CUDA ?= auto
DYNSWAP_WERROR ?= 0
DYNSWAP_UNITY ?= 1
PYTEST_ARGS ?=
TEETH_ARGS ?= --enough
DEMO_ARGS ?=
FUZZ_SECONDS ?= 60
SEEDS ?= 3
SECONDS ?= 600
# On the pretend device.
CUDA_TESTS ?= tests
# Once more over torch's own streams (DYNSWAP_ENGINE_BACKEND=torch), but for what the engine has no part in.
STREAMS_TESTS ?= tests/cuda
# On the other kinds of pretend device.
NO_TOOLKIT_TESTS ?= $(addprefix tests/,cuda/test_cuda_any_accelerator.py cuda/test_cuda_graphs.py cuda/test_cuda_streams.py \
  test_install.py test_provider_devices.py)
PRIVATEUSE1_TESTS ?= $(addprefix tests/,cuda/test_cuda_any_accelerator.py cuda/test_cuda_lesser_devices.py \
  cuda/test_cuda_other_streams.py \
  cuda/test_cuda_streams.py contract/test_lazy.py contract/test_modes.py contract/test_sent_where_it_computes.py \
  contract/test_ties.py contract/test_training.py test_install.py)
OTHER_PYTHON ?= 3.13
# Programs that train, for which what is saved leaves the device, too.
TRAININGS := $(addprefix tests/programs/,test_trainer.py test_peft.py test_lightning.py test_optimizers.py test_diffusers_lora.py)
RANDOM_PROGRAMS := tests/random_programs tests/programs/test_random_adapters.py
# Where `make wheel` works, and what the wheels name as the index that has those for other torches.
WHEEL_FOLDER ?= build/wheel
WHEEL_INDEX ?= file://$(CURDIR)/dist/simple
WHEEL_FILES ?=
WHEEL_TESTS := $(addprefix tests/,test_extension_libraries.py test_install.py contract/test_attributes.py)
# Of Python and torch, for `make wheels`.
PAIRS ?= $(shell $(PYTHON) build_backend/dynswap_build/supported.py)
# torch brings these, and has them loaded before the extension is.
REPAIR := auditwheel repair $(addprefix --exclude ,libc10.so libtorch.so libtorch_cpu.so libtorch_python.so)
# Not in the tree: it has a link to /, which setuptools would follow through all files of the machine.
WINE_FOLDER ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/dynswap-wine
MATRIX_ARGS ?=
# What `.installed` has besides the package.
EXTRAS ?= test,programs
NEWEST_ARGS ?=
# Set by `make test`, for the part of the tests that it runs.
ifdef QUICK
export DYNSWAP_TESTS := quick
endif
# `make lock`: what this Makefile installs; all in their newest versions. The libraries of CUDA whose versions torch names are left to it.
LOCKED_EXTRAS := test programs dev
LOCKED_GROUPS := $(shell sed -n '/^\[dependency-groups\]/,/^\[tool/s/^\([a-z]*\) = \[.*/\1/p' pyproject.toml)
LOCK_ARGS ?= --upgrade
OF_TORCH := ^(torch|triton|cuda-toolkit|nvidia-[a-z0-9-]*)==
export DYNSWAP_CUDA DYNSWAP_WERROR DYNSWAP_UNITY

BIN := $(VENV)/bin
# $(call pip_install,<virtual environment>) <requirements>: nothing is installed in another version than the locked one.
# (The variable is for what has no wheel; a pip that is too old for it does not look, and without isolation it is refused.)
pip_install = PIP_BUILD_CONSTRAINT=constraints.txt $(LOCKED_PIP)
LOCKED_PIP = $(1)/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
INSTALL = $(call pip_install,$(VENV))
# (setuptools warns of every editable install.)
EDITABLE = DYNSWAP_BUILD=python PYTHONWARNINGS=ignore $(call LOCKED_PIP,$(VENV)) --no-build-isolation --editable
# A virtual environment with the locked pip: the one that Python brings may not know --group.
venv = $(PYTHON) -m venv $(2) $(1) && $(call pip_install,$(1)) 'pip>=25.3'
CMAKE := $(or $(shell command -v cmake 2>/dev/null),$(BIN)/cmake)
CTEST := $(dir $(CMAKE))ctest
CPP := $(shell find csrc tests/cpp tests/device -name '*.h' -o -name '*.cpp' -o -name '*.cu')
# Two runs of the Python tests: those that share the machine, and then, alone, those that measure it.
PYTEST := $(BIN)/python -m pytest --quiet --no-header -r fE
# Runs targets one after the other, and sums them up.
STEPS := $(PYTHON) tests/steps.py
ALONGSIDE := OMP_NUM_THREADS=1 $(PYTEST) -n $(JOBS) --dist worksteal -m 'not alone'
ALONE := $(PYTEST) -m alone
# Builds the pretend device (tests/device), or says why there is none here and leaves the command out.
PRETEND := PYTHONPATH=tests/device $(BIN)/python -m pretend_cuda
# Reads the sources and imports nothing: needs neither torch nor the extension. (Its theme and plugins announce successors
# of mkdocs at each build.)
MKDOCS := NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(DOCS_VENV)/bin/mkdocs
SOURCES := $(shell find csrc build_backend -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.py')

.PHONY: help demo build test test-all test-native test-python test-coded test-offloaded test-cuda test-devices test-suite cruel teeth programs nightly cpp-test sanitize windows fuzz cuda-compile matrix newest ratios figures other-python lint types format docs docs-serve wheel wheels index lock sdist ci clean FORCE
.DELETE_ON_ERROR:

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo           the demonstration; DEMO_ARGS='--size 4GiB' and so on
demo: build
	$(BIN)/python -m dynswap_ext demo $(DEMO_ARGS)

## make build          the extension, in place
build: build/.built

## make test           the fast tests, with a line at the end that says what ran and what was skipped
test:
	@$(STEPS) 'make test' QUICK=1 build test-native test-cuda cpp-test

## make test-all       everything that a change has to pass on this machine: the continuous integration runs it
test-all:
	@$(STEPS) 'make test-all' build test-native test-python test-coded test-offloaded test-cuda test-devices test-suite cpp-test SEEDS=1 cruel

test-native: build $(VENV)/.installed
	DYNSWAP_PROVIDER=native $(ALONGSIDE) $(PYTEST_ARGS)
ifndef QUICK
	DYNSWAP_PROVIDER=native $(ALONE) $(PYTEST_ARGS) || [ $$? = 5 ]
endif

test-python: build $(VENV)/.installed
	DYNSWAP_PROVIDER=python $(ALONGSIDE) $(PYTEST_ARGS)
	DYNSWAP_PROVIDER=python $(ALONE) $(PYTEST_ARGS) || [ $$? = 5 ]

## make test-coded     the contract but for compilers, where all masters that can be are coded (docs/lossless.md)
test-coded: build $(VENV)/.installed
	DYNSWAP_TEST_MASTERS=coded DYNSWAP_PROVIDER=native $(ALONGSIDE) -k 'not compile and not export' tests/contract tests/test_semantics_*.py $(PYTEST_ARGS)

## make test-offloaded the contract but for compilers, and programs that train, where all that is saved leaves the device (activations=)
# With no room on the device, nothing of it can be fetched ahead.
test-offloaded: build $(VENV)/.installed
	DYNSWAP_TEST_ACTIVATIONS=offloaded DYNSWAP_PROVIDER=native $(ALONGSIDE) -k 'native and not compile and not export and not in_its_own_order_ahead' tests/contract tests/test_semantics_*.py $(TRAININGS) $(PYTEST_ARGS)

## make test-cuda      what installs a model, on a pretend CUDA device; DYNSWAP_SEED=7 is another order of its work
test-cuda: build $(VENV)/.installed
	$(PRETEND) env DYNSWAP_TEST_DEVICE=pretend $(ALONGSIDE) $(CUDA_TESTS) $(PYTEST_ARGS)
ifndef QUICK
	$(PRETEND) env DYNSWAP_TEST_DEVICE=pretend DYNSWAP_ENGINE_BACKEND=torch $(ALONGSIDE) -k 'not python- and not rules' $(STREAMS_TESTS) $(PYTEST_ARGS)
	$(PRETEND) env DYNSWAP_TEST_DEVICE=pretend $(ALONE) $(CUDA_TESTS) $(PYTEST_ARGS) || [ $$? = 5 ]
endif

## make test-devices   the same where there is no CUDA toolkit, and on an accelerator that is not called "cuda"
test-devices: build $(VENV)/.installed
	DYNSWAP_TEST_DEVICE=no-toolkit $(PRETEND) env $(ALONGSIDE) $(NO_TOOLKIT_TESTS) $(PYTEST_ARGS)
	DYNSWAP_TEST_DEVICE=privateuse1 $(PRETEND) env $(ALONGSIDE) $(PRIVATEUSE1_TESTS) $(PYTEST_ARGS)

## make test-suite     all parts of the suite for a borrowed GPU (benchmarks/gpu_suite.py), dry, on the pretend device
test-suite: build $(VENV)/.installed
	$(PRETEND) env DYNSWAP_TEST_DEVICE=pretend PYTHONPATH=tests/device/startup:tests/device \
	  $(BIN)/python benchmarks/gpu_suite.py --dry-run --time-limit 4000 --output build/gpu_suite.json

## make cruel          random programs on the pretend device, each with three orders; SEEDS=200 and so on
cruel: build $(VENV)/.installed
	$(PRETEND) $(BIN)/python tests/cruel/sweep.py --seeds $(SEEDS)

## make teeth          the same without one protection at a time, each of which has to be missed; a table
teeth: build $(VENV)/.installed
	$(PRETEND) --mutants $(BIN)/python tests/cruel/teeth.py --seeds $(SEEDS) $(TEETH_ARGS)

## make programs       random programs over the public API, a plain model being the oracle; SECONDS=600 and so on
programs: build $(VENV)/.installed
	OMP_NUM_THREADS=1 DYNSWAP_PROGRAMS_SECONDS=$$(($(SECONDS) / 2)) $(PYTEST) $(RANDOM_PROGRAMS) $(PYTEST_ARGS)
	$(PRETEND) env DYNSWAP_TEST_DEVICE=pretend DYNSWAP_TESTS=nightly OMP_NUM_THREADS=1 \
	  DYNSWAP_PROGRAMS_SECONDS=$$(($(SECONDS) / 2)) $(PYTEST) $(RANDOM_PROGRAMS) $(PYTEST_ARGS)

## make nightly        what is too long for each change
nightly: build
	$(MAKE) test-cuda DYNSWAP_SEED=$$(date +%j) DYNSWAP_TESTS=nightly
	$(MAKE) test-cuda CUDA_TESTS=tests/cuda STREAMS_TESTS=tests DYNSWAP_TESTS=nightly DYNSWAP_TEST_SEGMENTS=2097152
	$(MAKE) test-devices NO_TOOLKIT_TESTS=tests PRIVATEUSE1_TESTS=tests
	DYNSWAP_TESTS=nightly $(MAKE) test-python
	$(MAKE) cpp-test
	$(MAKE) test-suite
	$(MAKE) cruel SEEDS=200
	$(MAKE) teeth SEEDS=20
	$(MAKE) programs SECONDS=1200
	$(MAKE) other-python
	$(MAKE) fuzz FUZZ_SECONDS=600

# QUICK leaves out the mutants and the CUDA backend's own tests, which are most of the compiling.
## make cpp-test       the C++ tests
ifdef QUICK
cpp-test: | $(filter $(BIN)/cmake,$(CMAKE))
	$(CONFIGURE) -B build/cpp > /dev/null
	$(CMAKE) --build build/cpp --parallel $(JOBS) --target dynswap_tests
	$(CTEST) --test-dir build/cpp --output-on-failure --tests-regex '^cpp$$'
else
cpp-test: build/cpp/.built
	$(CTEST) --test-dir build/cpp --output-on-failure
endif

## make sanitize       the C++ tests under ASan+UBSan, and those with threads under TSan
sanitize: build/address/.built build/thread/.built
	$(CTEST) --test-dir build/address --parallel $(JOBS) --output-on-failure
	$(CTEST) --test-dir build/thread --parallel $(JOBS) --output-on-failure

## make windows        the C++ tests for Windows: compiled with MinGW-w64, and run under Wine where there is one
windows: build/windows/.built
	@if command -v wine > /dev/null; then \
	  mkdir -p $(WINE_FOLDER); \
	  WINEDEBUG=-all WINEPREFIX=$(WINE_FOLDER) $(CTEST) --test-dir build/windows --output-on-failure; \
	else \
	  echo "compiled, and not run: there is no wine here"; \
	fi

## make fuzz           the readers of checkpoint headers, guided by coverage; FUZZ_SECONDS=600 and so on
fuzz: build $(VENV)/.installed
	$(INSTALL) --group fuzz
	$(BIN)/python tests/fuzz/fuzz_headers.py -max_total_time=$(FUZZ_SECONDS)

## make cuda-compile   the extension with CUDA, without a warning; it has to import without a GPU
cuda-compile:
	$(MAKE) build DYNSWAP_CUDA=1 DYNSWAP_WERROR=1
	$(BIN)/python -c "import torch; from dynswap_ext import _C; info = _C.build_info(); print(info); assert info['cuda']"

## make ratios         what accesses, forwards and installs cost, against a baseline; RATIOS_ARGS='--renew 5' keeps a new one
ratios: build $(VENV)/.installed
	$(BIN)/python benchmarks/ratios.py $(RATIOS_ARGS)

## make figures        the records that README and docs cite, measured again on an idle machine, and what they fill in
figures: build $(VENV)/.installed
	$(EDITABLE) '.[bench,peers]'
	$(BIN)/python benchmarks/renew.py $(FIGURES_ARGS)

## make matrix         each supported Python with a torch, from nothing: benchmarks/results/matrix.json
matrix: build $(VENV)/.installed
	$(BIN)/python benchmarks/matrix.py $(MATRIX_ARGS)

## make newest         the programs with the newest release of each library, one at a time and then all; a table
newest: build $(VENV)/.installed
	$(INSTALL) --group lock
	$(BIN)/python benchmarks/newest.py $(NEWEST_ARGS)

## make other-python   a wheel for another Python (OTHER_PYTHON=3.13), and some tests with it
other-python: build $(VENV)/.installed
	$(BIN)/python benchmarks/matrix.py --tiny --only $(OTHER_PYTHON) --cuda 0

## make lint types     what is checked without running it; make format mends what it can
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	@$(BIN)/clang-format --dry-run -Werror $(CPP)
	@printf '%s\n' $(filter-out %_windows.cpp,$(wildcard $(addsuffix /*.cpp,$(addprefix csrc/,platform core io lossless mesh transfer host sim)))) \
	  | xargs -P $(JOBS) -n 4 sh -c '$(BIN)/clang-tidy --quiet "$$@" -- -std=c++20 -Icsrc 2> /dev/null' _

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

## make docs           the documentation site, in build/site; a broken link is an error
docs: $(DOCS_VENV)/.installed
	$(MKDOCS) build

## make docs-serve     the same on http://localhost:8000 while its pages are written
docs-serve: $(DOCS_VENV)/.installed
	$(MKDOCS) serve

# From the source archive: the objects of `make build` stay as they are.
## make wheel          a wheel for this Python and this torch, in dist: repaired, and tested as it is installed; then make index
wheel: $(VENV)/.installed $(WHEEL_VENV)/.installed
	rm -rf $(WHEEL_FOLDER)
	$(WHEEL_VENV)/bin/python -m build --no-isolation --sdist --outdir $(WHEEL_FOLDER) > build/wheel.log 2>&1 || { tail -n 30 build/wheel.log; exit 1; }
	DYNSWAP_WHEEL_INDEX='$(WHEEL_INDEX)' $(BIN)/python -m pip --quiet wheel --build-constraint constraints.txt --no-deps --wheel-dir $(WHEEL_FOLDER)/built $(WHEEL_FOLDER)/*.tar.gz
	PATH="$(abspath $(WHEEL_VENV))/bin:$$PATH" $(REPAIR) --wheel-dir $(WHEEL_FOLDER) $(WHEEL_FOLDER)/built/*.whl
	$(INSTALL) --no-deps --target $(WHEEL_FOLDER)/installed $(WHEEL_FOLDER)/*.whl
	cd $(WHEEL_FOLDER) && PYTHONPATH=installed $(abspath $(BIN))/python -m dynswap_ext info
	cd $(WHEEL_FOLDER) && PYTHONPATH=installed $(abspath $(BIN))/python -m pytest -q -p no:cacheprovider $(addprefix $(CURDIR)/,$(WHEEL_TESTS))
	mkdir -p dist && mv $(WHEEL_FOLDER)/*.whl dist
	$(MAKE) --no-print-directory index

## make wheels         the same for each supported pair, from nothing, one after the other; PAIRS='3.11-2.13 3.12-2.14'
wheels:
	@$(STEPS) 'make wheels' $(addprefix wheel-,$(PAIRS))

# wheel-3.11-2.13. (Where pyenv has the interpreters, it is told which.)
wheel-%: PAIR = $(subst -, ,$*)
wheel-%: $(WHEEL_VENV)/.installed
	rm -rf build/wheels/$*
	PYENV_VERSION=$(firstword $(PAIR)) $(MAKE) wheel PYTHON=python$(firstword $(PAIR)) TORCH='torch==$(lastword $(PAIR)).*' \
	  EXTRAS=test VENV=build/wheels/$*/venv WHEEL_FOLDER=build/wheels/$*/wheel
	rm -rf build/wheels/$*

## make index          of the wheels in dist, for pip: dist/simple; WHEEL_FILES=https://... is where they are published
index:
	$(PYTHON) build_backend/wheel_index.py dist $(addprefix --files ,$(WHEEL_FILES))

## make lock           the newest versions in constraints.txt; LOCK_ARGS='--upgrade-package peft' moves one package alone
lock: $(VENV)/.package
	$(INSTALL) --group lock
	@mkdir -p build && cp constraints.txt build/constraints.txt
	DYNSWAP_BUILD=python $(BIN)/uv --quiet pip compile pyproject.toml --universal --python-version 3.10 --no-build-isolation \
	  --python $(BIN)/python --no-python-downloads $(addprefix --extra ,$(LOCKED_EXTRAS)) $(addprefix --group ,$(LOCKED_GROUPS)) \
	  --annotation-style line --custom-compile-command 'make lock' --output-file build/constraints.txt $(LOCK_ARGS) > /dev/null
	grep -vE '$(OF_TORCH)' build/constraints.txt > constraints.txt
	$(BIN)/python benchmarks/figures.py

## make sdist          the source archive, in dist
sdist: $(WHEEL_VENV)/.installed
	$(WHEEL_VENV)/bin/python -m build --no-isolation --sdist --outdir dist

## make ci             what the continuous integration runs
ci:
	.ci/run

## make clean          removes what was built, and keeps .venv
clean:
	rm -rf build dynswap_ext/*.so

# ------------------------------------------------------------------------------------------- set-up

# A new lock is a new environment's.
$(VENV)/.torch: constraints.txt
	$(call venv,$(VENV),$(VENV_FLAGS))
	$(INSTALL) --group build $(if $(TORCH),'$(TORCH)')
	@touch $@

# The package itself as a link to this folder: what is written here is what runs. Without NumPy torch warns.
$(VENV)/.package: pyproject.toml $(VENV)/.torch
	$(EDITABLE) . numpy
	@touch $@

# What the tests need, too.
$(VENV)/.installed: pyproject.toml $(VENV)/.package
	$(EDITABLE) '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.installed
	$(EDITABLE) '.[dev]'
	@touch $@

# Without the package and its torch.
$(DOCS_VENV)/.installed: pyproject.toml constraints.txt
	$(call venv,$(DOCS_VENV))
	$(call pip_install,$(DOCS_VENV)) --group docs
	@touch $@

$(WHEEL_VENV)/.installed: pyproject.toml constraints.txt
	$(call venv,$(WHEEL_VENV))
	$(call pip_install,$(WHEEL_VENV)) --group wheels --group build
	@touch $@

# Changes only when the settings do.
build/.settings: FORCE
	@mkdir -p build
	@echo '$(DYNSWAP_CUDA) $(DYNSWAP_WERROR) $(DYNSWAP_UNITY)' > $@.now
	@if cmp -s $@.now $@; then rm $@.now; else mv $@.now $@; fi

build/.built: $(VENV)/.package setup.py build/.settings $(SOURCES)
	@echo "compiling the extension (build/build.log)"
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python setup.py build_ext --inplace > build/build.log 2>&1 \
	  || { grep -vE '^\[[0-9]+/[0-9]+\]' build/build.log | tail -n 60; exit 1; }
	@grep '^dynswap_ext._C:' build/build.log
	@touch $@

# The C++ tests need no Python, and where the system has no CMake it comes with pip.
$(BIN)/cmake: $(VENV)/.torch
	$(INSTALL) --group cmake
	@touch $@

build/windows/.built: TOOLCHAIN = -DCMAKE_TOOLCHAIN_FILE=tests/cpp/mingw.cmake
build/address/.built: SANITIZE = address
build/thread/.built: SANITIZE = thread
CONFIGURE = $(CMAKE) -S . -DDYNSWAP_CUDA=0 -DDYNSWAP_SANITIZE=$(SANITIZE) -DDYNSWAP_UNITY=$(DYNSWAP_UNITY) $(TOOLCHAIN) $(WITH_TORCH)
# csrc/tensor is tested in one of them: where torch is.
build/cpp/.built: | $(VENV)/.installed
build/cpp/.built: WITH_TORCH = -DDYNSWAP_TORCH=$(shell $(BIN)/python -c 'import torch; print(torch.__path__[0])')
build/%/.built: CMakeLists.txt $(CPP) | $(filter $(BIN)/cmake,$(CMAKE))
	$(CONFIGURE) -B build/$*
	$(CMAKE) --build build/$* --parallel $(JOBS)
	@touch $@
