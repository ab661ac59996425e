# make demo      the main job on real data, with a join, a leave and a kill -9, and the same job undisturbed
# make test      all tests but those of test-world, test-long and examples-test; twenty minutes on two slow cores
# make test-world  what takes root, daemons or an index: other users, network namespaces, quotas, small disks, S3, a wheel;
#                 real sshd processes; other CPUs, where apt's qemu-user is installed; and images, where apt's docker.io,
#                 docker-registry and debootstrap are. BUT="and not minutes" for less.
#                 PART=3/12 takes the fourth of twelve parts of the tests; test and test-long know it too
# make test-cuda  what takes a GPU; each such test says so elsewhere
# make test-long what make test leaves out: further cases, and most runs of several processes
# make test-oldest  the fast tests and the demo with the oldest torch that pyproject.toml claims; gigabytes
# make examples  what the examples need; docs/examples.md has their commands
# make examples-test  all examples, and the ported programs of other people, through a random history of joins, leaves
#                     and kills; the programs are fetched, or PORTED_SOURCES names a folder with their repositories
# make simulate  100,000 random schedules of the protocol, on a fake clock and network, others each day (FIRST=0)
# make check     formatting, lint, strict types
# make fuzz      arbitrary bytes, guided by coverage, wherever bytes from others come in; FUZZ_S=60 seconds each
# make chaos     real processes under random faults, run after run, others each day (MINUTES=10 SEED=1); as root, links too
# make attack    what strangers, ticket holders and bad members may try, each on a live run; under five minutes
# make dependencies  whether anything is known against the versions that farandole is run with; asks pip-audit
# make bench     throughput and pauses against DistributedDataParallel and torchft; what a checkpoint costs
# make bench-data  data paths against others', in turns, each in an environment of its own; some gigabytes, half an hour
# make lending   a training lends its nodes to an urgent job of a real Slurm and takes them again; needs root and apt
# make screens   the pictures of docs/ and README, from a run of the demo in a real Chromium
# make docs      the site, in site/: the pages of docs/, and the reference from docstrings, help and tests; works offline
# make docs-check  the pages' programs compile, the site builds without a warning, and the commands run, but those that a
#                  test runs; with hosts over a real sshd, S3 and EC2 by moto; about half an hour
# make texts     all help texts, errors and events in one file, texts.txt, to be read
# make study     experiments/dynamic_sgd: the batch follows the workers; some hours on two cores, resumable
#
# Each sets up .venv under constraints.txt first, once. torch is installed before anything that asks for it, and pinned:
# an open range would fetch the newest CUDA build and gigabytes of packages.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install --constraint constraints.txt
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

.PHONY: demo test test-world test-cuda test-long test-oldest examples examples-test simulate check chaos attack fuzz dependencies bench bench-data lending docs docs-check screens texts study clean

demo: $(VENV)/.demo
	@$(BIN)/python examples/demo.py

# Tests of processes wait much of their time: two more than there are cores keep the cores busy. They come first
# (tests/conftest.py), and who has none left takes over what others have not begun. GPUs are hidden: test-cuda has them.
# A test that hangs where no signal is heard (in a library's destructor) is told with its stacks, and its process ended.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PYTEST = -m pytest -n $(shell echo $$(( $(CORES) < 3 ? $(CORES) + 2 : 4 ))) --dist worksteal \
    -o faulthandler_timeout=$(HANGS_S) -o faulthandler_exit_on_timeout=true $(if $(PART),--part $(PART))
HANGS_S = 450

test test-world test-long test-oldest: export CUDA_VISIBLE_DEVICES =
test-world: HANGS_S = 2000
# What an environment says to OpenBLAS changes NumPy's bits, and a host by ssh does not hear it.
# Without .pyc files each process compiles farandole's sources, and pytest rewrites each test file in each of its processes.
unexport PYTHONDONTWRITEBYTECODE
unexport OPENBLAS_CORETYPE OPENBLAS_L2_SIZE OPENBLAS_NUM_THREADS
test-long: HANGS_S = 4000

test: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m "not world and not examples and not long" --durations=20

test-world: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m "world and not long $(BUT)"

test-cuda: $(VENV)/.dev
	$(BIN)/python -m pytest tests/cuda

test-long: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m long

# An index keeps CPU builds of new versions at most, and torchvision must be the release that belongs to the torch.
OLDEST := $(VENV)-oldest
CLAIMED := $(shell sed -n 's/^ *"torch>=\(.*\)",$$/\1/p' pyproject.toml)

test-oldest: $(OLDEST)/.dev
	$(OLDEST)/bin/python $(PYTEST) -m "not processes and not world"
	$(OLDEST)/bin/python examples/demo.py

$(OLDEST)/.dev: constraints.txt pyproject.toml
	@echo "setting up $(OLDEST) with torch $(CLAIMED) (once; gigabytes where the index has it for GPUs only)"
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@{ echo "torch==$(CLAIMED).*"; grep -v -e '^torch==' -e '^torchvision==' constraints.txt; } > $(OLDEST)/constraints.txt
	@for what in "torch==$(CLAIMED).* numpy" "-e .[dev]"; do $(OLDEST)/bin/python -m pip --disable-pip-version-check -q \
	    install --constraint $(OLDEST)/constraints.txt $$what || exit 1; done
	@touch $@

examples: $(VENV)/.examples

examples-test: $(VENV)/.dev
	$(BIN)/python -m pytest -m examples tests/system/test_examples.py tests/system/test_ported.py

# What is drawn at random changes from day to day; the seeds are printed, and SEED or FIRST makes the same again.
DAY := $(shell echo $$(( $$(date +%s) / 86400 )))
FIRST ?= $(DAY)00000

simulate: $(VENV)/.dev
	$(BIN)/python -m tests.protocol.simulate --schedules 100000 --first $(FIRST)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

MINUTES ?= 10
SEED ?= $(DAY)000

chaos: $(VENV)/.dev
	@$(BIN)/python -m chaos --minutes $(MINUTES) --seed $(SEED)
	@test "$$(id -u)" != 0 || $(BIN)/python -m chaos --network --minutes $(MINUTES) --seed $(SEED)

attack: $(VENV)/.dev
	@$(BIN)/python -m attack

FUZZ_S ?= 60

fuzz: $(VENV)/.dev
	for target in message answer ticket tickets listen body state ends head stranger lines metrics \
	    index shard tokens image fields mds manifest checkpoint record request frames hello; do \
	    $(BIN)/python -m tests.fuzz.harness $$target $(FUZZ_S) || exit 1; done

AUDIT := $(VENV)-audit

dependencies: $(VENV)/.dev
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/python -m pip \
	    --disable-pip-version-check -q install pip-audit==2.10.1; }
	@$(BIN)/python -m tests.support.audit $(AUDIT)/bin/pip-audit

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/steady.py
	$(BIN)/farandole bench steps benchmarks/steps.py --model perceptron
	$(BIN)/farandole bench steps benchmarks/steps.py --model convolutional
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/pauses.py
	$(BIN)/python benchmarks/joins.py
	$(BIN)/python benchmarks/checkpoints.py

# Each peer's packages lie in front of .venv's: it has versions of its own of what they share, and the same torch.
PEERS := $(VENV)-peers
SOURCE ?=

bench-data: $(PEERS)/streaming $(PEERS)/litdata $(PEERS)/dali
	$(BIN)/python benchmarks/data.py all --side 400 $(if $(SOURCE),--source $(SOURCE))

$(PEERS)/streaming: PEER = mosaicml-streaming==0.13.0
$(PEERS)/litdata: PEER = litdata==0.2.76
$(PEERS)/dali: PEER = nvidia-dali-cuda120==2.4.0

$(PEERS)/%: $(VENV)/.dev
	@echo "setting up $@ with $(PEER) (once)"
	@rm -rf $@ && $(PYTHON) -m venv $@
	@echo "import site; site.addsitedir('$(abspath $(VENV))/lib/$(notdir $(wildcard $(VENV)/lib/python3*))/site-packages')" \
	    > $@/lib/$(notdir $(wildcard $(VENV)/lib/python3*))/site-packages/shared.pth
	@$@/bin/python -m pip --disable-pip-version-check -q install $(PEER)

lending: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.lending

screens: $(VENV)/.dev
	@PYTHONPATH=. $(BIN)/python docs/screens.py

# The variable drops a banner about later versions of mkdocs.
docs docs-check: export NO_MKDOCS_2_WARNING = 1

docs: $(VENV)/.docs
	@$(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

docs-check: $(VENV)/.dev
	$(BIN)/python $(PYTEST) tests/cli/test_commands_of_pages.py tests/test_site.py tests/test_pointers.py
	@$(BIN)/python -m docs.check

texts: $(VENV)/.dev
	@$(BIN)/python docs/texts.py

study: $(VENV)/.study
	$(BIN)/python -m experiments.dynamic_sgd run
	$(BIN)/python -m experiments.dynamic_sgd plot

$(VENV)/.torch: constraints.txt
	@echo "setting up $(VENV) with $(TORCH) (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) "$(TORCH)" numpy
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(PIP) -e ".[demo]"
	@touch $@

$(VENV)/.examples: $(VENV)/.torch pyproject.toml
	@$(PIP) -e ".[examples]"
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@$(PIP) -e ".[dev]"
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	@$(PIP) -e ".[docs]"
	@touch $@

$(VENV)/.bench: $(VENV)/.torch pyproject.toml
	@$(PIP) -e ".[bench]"
	@touch $@

$(VENV)/.study: $(VENV)/.torch pyproject.toml
	@$(PIP) -r experiments/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(AUDIT) $(OLDEST) $(PEERS) build site src/*.egg-info
