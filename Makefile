# Two commands: `make run` shows the method at work, `make test` checks everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed
STAMP := $(VENV)/.installed-dev

.PHONY: run test lint types clean

run: $(BASE)
	$(BIN)/fedensemble compare

# Two test processes with one thread each, because more threads than cores slow each other down.
test: $(STAMP) lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

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

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
