# `make train` and `make test` install what they need into .venv the first time; a second call does not reinstall.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install football readme train test test-slow walk format clean

train: .venv/installed  ## three agents learn to cover three landmarks: about a minute
	$(BIN)/shoal train mappo simple_spread --steps 2M --envs 256 --algo.lr 1e-3 --algo.gamma 0.95

test: .venv/installed  ## format, lint, types and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow" -n 2 --dist worksteal

football: .venv/installed  ## build Google Research Football (about four minutes, once) and install it
	scripts/football.sh

test-slow: .venv/installed  ## learning tests that take longer than a few seconds each
	$(BIN)/pytest -m slow -n 2 --dist worksteal

walk: .venv/installed  ## how much one reads to follow an iteration
	$(BIN)/python scripts/walk.py

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

readme: .venv/installed  ## make the tables of README.md and docs/ anew
	$(BIN)/python scripts/readme.py

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt scripts/football.sh
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): apt install python3 python3-venv, or name another by PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: name a newer one by PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	scripts/football.sh --cached
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
