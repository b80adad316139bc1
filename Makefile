# make demo: install into .venv and run the main job. make test: install and run lint, types and tests.
# make test-all: the tests marked `slow` as well. Tests run in as many processes as there are cores, of one thread each; each
# begins with a share of them in their order, so that most of what a file's tests share is made once.
# make docs: the pages that are made from the source, and the site in site/ with its notebooks; links and anchors are checked.
# make attack OPTIONS="--seconds 600 --seed 7": attack a server for ten minutes, beside honest clients.
# make bench TABLE=training OPTIONS="--rounds 5": install the peers into .bench and measure; all if no table is named.
# make real OPTIONS="--only rxnmapper": fetch packages with trained models by name, and try every verb on each; with
# REAL=/path, the wheels are there already.
# make release-check: build the wheel, install it in a clean environment, try it there (OPTIONS=lowest or newest).
# make reading: how much there is to read, how dense it is, and turns of prose to mend; each with its ceiling.
# make mutants OPTIONS="triptych.core.algebra.spectrum*": which small changes of a module no test notices (mutmut; without OPTIONS, days).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH := .bench
BENCH_STAMP := $(BENCH)/.installed
TABLE ?= all

# Tests start many commands, and each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo reading real test test-all attack install lint types docs bench mutants release-check clean

demo: $(STAMP)
	@echo "== demo: train a small translator, try it, write a report"
	$(BIN)/triptych demo

test: lint types
	@echo "== tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-all: lint types
	@echo "== all tests, slow ones too"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-profile=explore

lint: $(STAMP)
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	@echo "== types"
	$(BIN)/mypy

install: $(STAMP)

# Installs once, and again only when what is to be installed changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "triptych needs Python 3.11 or later: make PYTHON=python3.12 ..."; exit 1; }
	@echo "== install into $(VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

docs: $(STAMP)
	@echo "== docs: generated pages, then the site in site/ (read it with: python -m http.server -d site)"
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/demo_page.py docs/demo.html
	$(BIN)/python -m zensical build --clean --strict
	$(BIN)/python docs/notebooks.py site
	cd docs && find . -name '*.md' | tar -cf - -T - | tar -xf - -C ../site
	cd docs && grep -rm1 --include='*.md' '^# ' . | sort | sed 's|^./\(.*\):# \(.*\)|- [\2](\1)|' > ../site/llms.txt

bench: $(BENCH_STAMP)
	$(BENCH)/bin/python benchmarks/bench.py $(TABLE) $(OPTIONS)

attack: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/serve/attack.py $(OPTIONS)

real: $(STAMP)
	$(BIN)/python tests/real.py $(if $(REAL),--wheels $(REAL)) $(OPTIONS)

reading:
	$(PYTHON) tests/reading.py $(OPTIONS)

mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(OPTIONS)

release-check:
	$(PYTHON) .ci/release.py $(OPTIONS)

# The list of peers is whole and exact: nothing is looked for besides (some ask for what excludes the rest).
$(BENCH_STAMP): pyproject.toml constraints.txt benchmarks/peers.txt
	@echo "== install the peers into $(BENCH) (once; a few minutes)"
	$(PYTHON) -m venv $(BENCH)
	PIP_CONSTRAINT=constraints.txt $(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[all]" altair
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers.txt
	@touch $(BENCH_STAMP)

clean:
	rm -rf $(VENV) $(BENCH) site demo runs .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
