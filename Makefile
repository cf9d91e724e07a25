# Everything runs in a virtual environment of its own, made on first use. Needed: Python 3.10 or newer; no compiler.
PYTHON ?= python3
# Passed to the command that a target runs: make demo ARGS="--steps 50", make test ARGS="-k dispatch"
ARGS ?=
# Passed to pip install, for instance --index-url URL
PIP_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin

# What each target installs beside torch.
extras-demo := demo
extras-bench := bench,triton,cutedsl
extras-docs := docs
extras-test := demo,docs,test,dev,triton,cutedsl,transformers,trl

.PHONY: help demo bench test lint format docs clean distclean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 18

demo: $(VENV)/.installed-demo ## train a small language model on real text with the fused loss (a few minutes on a CPU)
	$(BIN)/python examples/train_lm.py $(ARGS)

bench: $(VENV)/.installed-bench ## measure this machine: time and memory of the losses, and of training steps on a GPU
	$(BIN)/python -m benchmark $(ARGS)

# One thread per worker: the workers fill the cores.
test: lint ## lint, types, and the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

fuzz: $(VENV)/.installed-test ## the properties on examples that no run has seen yet (many minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --hypothesis-profile explore test/test_properties.py test/test_lives.py $(ARGS)

lint: $(VENV)/.installed-test ## lint and types only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed-test ## lay the code out, fix what the linter can fix, and regenerate the generated parts of the docs
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/python -W "ignore:Failed to initialize NumPy" docs/generate.py
	$(BIN)/python -W "ignore:Failed to initialize NumPy" docs/plots.py

docs: $(VENV)/.installed-docs ## build the documentation into site/
	$(BIN)/python -W "ignore:Failed to initialize NumPy" docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove what was built, keep the virtual environment
	rm -rf site build dist train_lm.png .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove the virtual environment too
	rm -rf $(VENV)

# An install is repeated only after pyproject.toml or constraints.txt has changed.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): liger[$(extras-$*)] (the first time this fetches PyTorch and takes minutes)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt hatchling editables
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt --no-build-isolation -e '.[$(extras-$*)]'
	@touch $@

$(BIN)/python:
	@command -v '$(PYTHON)' > /dev/null || { echo "error: no '$(PYTHON)' here; liger needs Python 3.10 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.version_info >= (3, 10) or sys.exit("error: $(PYTHON) is Python " + v + "; liger needs 3.10 or newer: make PYTHON=/path/to/python3")'
	@'$(PYTHON)' -m venv $(VENV) || { rm -rf $(VENV); echo "error: '$(PYTHON) -m venv' failed; Debian and Ubuntu have it in the package python3-venv" >&2; exit 1; }
