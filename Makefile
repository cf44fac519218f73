# Three commands: `make run` shows the method at work, `make test` checks everything, `make docs` builds the site.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed
STAMP := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
# For test-torch: the version of torch, by default the oldest that pyproject.toml allows, and the tests to run.
TORCH ?= 2.8.0
TORCH_VENV := .venv-torch-$(TORCH)
TESTS ?= tests src
# Compiled modules are kept, even if the environment says otherwise: the tests start hundreds of processes, and each would
# compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-torch lint types docs dist clean

run: $(BASE)
	$(BIN)/fedensemble compare

# Three test processes for two cores: one of them tests the fleet first and mostly waits for messages. One thread each,
# because more threads than cores slow each other down.
test: $(STAMP) lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup

# The tests with another torch, in an environment of its own: `make test-torch TORCH=2.11.0`.
test-torch: $(TORCH_VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -n 3 --dist loadgroup $(TESTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# The site, in build/docs/html. A warning is an error, and so is a link that leads nowhere.
docs: $(DOCS)
	$(BIN)/python docs/site/pages.py build/docs/source
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W -n -q --keep-going -j 2 -c docs/site build/docs/source build/docs/html
	@echo "The site is build/docs/html/index.html."

# A source distribution and a wheel made from it, in dist/, tried in an environment that has nothing else.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	FEDENSEMBLE_DIST=dist OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/package

$(BASE): pyproject.toml constraints.txt
	@echo "Setting up $(VENV); PyTorch is large, so this can take some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $(BASE)

$(STAMP): $(BASE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
# The aggregators of ByzFL, which ours are compared with. Without its dependencies: only its benchmark needs them, and
# torchvision would have to match torch's build. Where it cannot be had, that one test is skipped.
	-$(BIN)/python -m pip install --quiet --no-deps byzfl==0.0.11
	touch $(STAMP)

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $(DOCS)

# The other pins hold for every torch of the range, so that a failure is due to torch.
$(TORCH_VENV)/.installed-dev: pyproject.toml constraints.txt
	@echo "Setting up $(TORCH_VENV); PyTorch is large, so this can take some minutes."
	$(PYTHON) -m venv $(TORCH_VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet -c $(TORCH_VENV)/constraints.txt -e ".[dev]"
	-$(TORCH_VENV)/bin/python -m pip install --quiet --no-deps byzfl==0.0.11
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
