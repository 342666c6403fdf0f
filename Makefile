# make demo   trains, kills, resumes and compares: the promise, shown
# make test   linters, types, import floors and tests; with CI set also the slow ones
#
# Both set up a virtual environment in .venv on first use; all they need is Python >= 3.10 with venv.
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input install --constraint constraints.txt

# One thread per process: sums are then taken in the same order whatever the machine.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench crash-matrix clean distclean

help:
	@sed -n '1,6s/^# \{0,1\}//p' Makefile
	@echo 'make lint, make bench, make crash-matrix, make clean (caches, output), make distclean (.venv too)'

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest
ifneq ($(CI),)
	@if $(BIN)/python -m pytest --collect-only --quiet -m slow >/dev/null; [ $$? -ne 5 ]; then \
		echo '$(BIN)/python -m pytest -m slow'; $(BIN)/python -m pytest -m slow; \
	fi
endif

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.installed-bench
	@set -e; for script in benchmarks/[a-z]*.py; do \
		[ -e "$$script" ] || { echo 'error: there is no script in benchmarks/' >&2; exit 1; }; \
		case "$$script" in */device_check.py) continue;; esac; \
		echo "$(BIN)/python $$script"; $(BIN)/python "$$script"; \
	done
	$(BIN)/python benchmarks/common/table.py

crash-matrix: $(VENV)/.installed-dev
	$(BIN)/python -m tests.crash.matrix docs/reference/crash-matrix.md

clean:
	rm -rf output build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# --- set-up ---------------------------------------------------------------------------------------

$(VENV)/.created:
	@$(PYTHON) -c 'pass' 2>/dev/null || { \
		echo 'error: `$(PYTHON)` does not run; name a Python >= 3.10: make $(MAKECMDGOALS) PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "error: perdure needs Python >= 3.10, and \`$(PYTHON)\` is $$($(PYTHON) -V 2>&1 | cut -d' ' -f2); name a newer one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo 'error: `$(PYTHON)` cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv' >&2; exit 1; }
	@echo 'making $(VENV)'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: with it in place, nothing that comes after can choose another build of it.
$(VENV)/.installed-torch: constraints.txt | $(VENV)/.created
	@echo 'installing torch'
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) hatchling editables
	@touch $@

$(VENV)/.installed-demo: pyproject.toml $(VENV)/.installed-torch
	@echo 'installing perdure'
	@$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-torch
	@echo 'installing perdure and what its tests need'
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.installed-bench: pyproject.toml $(VENV)/.installed-dev
	@echo 'installing the peers that are measured beside'
	@$(PIP) --no-build-isolation --editable '.[bench]'
	@touch $@
