# The README's two commands are `make demo` and `make test`; each does its own set-up.
PYTHON ?= python3.11
UV_VERSION := 0.13.8
BIN := .venv/bin
# Tests and tools must not ask a model hub for anything.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
# The first import of a module caches its bytecode. Without this cache, SGLang's import takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test lint docs pictures dist bench soak matrix seams integrations lock lock-releases lock-integrations clean

setup: .venv/.complete

.venv/.complete: pyproject.toml requirements.lock
	test -x $(BIN)/uv || { $(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet uv==$(UV_VERSION); }
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml

# Warnings and broken links inside the site are errors. LINKS=1 also asks every external address, with a network.
docs: setup
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	$(if $(LINKS),$(BIN)/sphinx-build -q -W --keep-going -b linkcheck docs docs/_build/links)
	@echo "the site is docs/_build/html/index.html$(if $(LINKS),,; external links were not checked: make docs LINKS=1)"

# Draws the documentation's pictures. .ci/browser installs the Chromium that takes the screenshots.
pictures: setup
	$(BIN)/python -m docs.pictures.make_pictures

# The wheel and the source distribution in dist/, without a network. The tests install the wheel.
dist: setup
	rm -rf dist
	$(BIN)/python -m hatchling build

# Leaves what it measured in benchmarks/results/, as JSON and as pictures.
bench: .venv/.bench
	$(BIN)/python -m benchmarks

.venv/.bench: requirements-bench.lock .venv/.complete
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements-bench.lock
	touch $@

# SECONDS and REQUESTS bound it; PART=mixed, engines, kills or abuse runs one part of it.
soak: setup
	SECONDS=$(or $(SECONDS),1800) REQUESTS=$(or $(REQUESTS),20000) $(BIN)/python -m tests.soak $(PART)

# The engine's tests on every SGLang release that is served, or on RELEASES="0.5.20 0.5.12", one after the other;
# what has a result in releases/ already is not run again. An environment of 10 GB at a time, hours in all.
matrix: setup
	$(BIN)/python -m tests.matrix run $(RELEASES)

# The same releases, looked at without installing what they need and without a start: seconds each.
seams: setup
	$(BIN)/python -m tests.matrix seams $(RELEASES)

# The adapters for verl and Megatron-core on the frameworks themselves, in an environment of their own: 10 GB, which
# stays until `make clean`.
integrations: .integrations/.complete
	.integrations/bin/python -m pytest -p no:cacheprovider -o filterwarnings=default tests/integrations/verl
	.integrations/bin/python -m pytest -p no:cacheprovider -o filterwarnings=default tests/integrations/megatron
	$(BIN)/python -m pytest tests/integrations/trl/test_megatron.py

VERL_PYTHON := .integrations/bin/python
.integrations/.complete: integrations/verl.lock | .venv/.complete
	rm -rf .integrations
	$(BIN)/uv venv --quiet --no-python-downloads --python 3.12 .integrations
	$(BIN)/uv pip install --quiet --python $(VERL_PYTHON) --no-deps --require-hashes -r integrations/verl.lock
	rm -rf .integrations/lib/python3.12/site-packages/tests  # verl's wheel has its tests there, and they would hide ours
	$(BIN)/uv pip install --quiet --python $(VERL_PYTHON) --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/python examples/rollout_loop.py

# Re-pin everything. Names no package index, so that it installs from whichever one is configured.
PIN := --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --quiet
lock: setup
	$(BIN)/uv pip compile pyproject.toml --extra torch --extra server --extra sglang --extra data \
	  --group dev \
	  $(PIN) --output-file requirements.lock
	$(BIN)/uv pip compile --group bench --constraint requirements.lock $(PIN) --output-file requirements-bench.lock

lock-releases: setup
	$(BIN)/python -m tests.matrix pin $(RELEASES)

# SGLang 0.5.12 pins a transformers that verl excludes. verl's own environment overrides it in the same way.
lock-integrations: setup
	$(BIN)/uv pip compile pyproject.toml --extra torch --extra server --group verl \
	  --override integrations/verl-overrides.txt --only-binary :all: --no-binary antlr4-python3-runtime \
	  --python-version 3.12 --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet --upgrade \
	  --output-file integrations/verl.lock

clean:
	rm -rf .venv .matrix .integrations
