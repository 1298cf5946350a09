# Everything happens in .venv; a target that has nothing to do takes a moment.
#   make run    install, fetch the default model, open the console
#   make test   install with the development tools, fetch the default model, run the tests
# For a CPU-only or mirrored torch, set pip's own variables, for example PIP_FIND_LINKS=FOLDER.

.DEFAULT_GOAL := help
.PHONY: help run test test-sglang lint bench-check serve-check tune-check auto-check faults soak fuzz coverage cases clean
.DELETE_ON_ERROR:

venv_python := .venv/bin/python
pip_install := $(venv_python) -m pip install --disable-pip-version-check --constraint constraints.txt

help:
	@echo "make run          install, fetch the default model and open the console"
	@echo "make test         run the tests"
	@echo "make test-sglang  run SGLang itself on this CPU, with the plugin (minutes; 3 GB for its environment)"
	@echo "make lint         run ruff, mypy and the import contracts"
	@echo "make bench-check  check speed and memory on this machine (it should be idle)"
	@echo "make serve-check  check what serving over HTTP costs on this machine"
	@echo "make tune-check   check tune against exhaustive search (idle machine, 10 minutes)"
	@echo "make auto-check   check auto mode against fixed settings (idle machine, 20 minutes)"
	@echo "make faults       days under faults (SCHEDULES=500), FIRST=0 is the first seed"
	@echo "make soak         one server for MINUTES=120, and whether it holds more at the end"
	@echo "make fuzz         spoilt input for every reader, MINUTES=10 each, SEED=0"
	@echo "make coverage     the tests again, with the lines of runtime, snapshots, layouts that none ran"
	@echo "make cases        write tests/CASES.md anew"
	@echo "make clean        remove the environment and all caches of this folder"

.venv/created:
	@for python in python3 python3.13 python3.12 python3.11; do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "creating .venv with $$("$$python" --version)"; \
	        "$$python" -m venv .venv && exec touch $@ || exit 1; \
	    fi; \
	done; \
	echo "no Python >= 3.11 with its venv module found (looked for python3, python3.13, 3.12, 3.11);" \
	    "install one, on Debian and Ubuntu with its python3-venv package" >&2; exit 1

.venv/installed: pyproject.toml constraints.txt .venv/created
	$(pip_install) --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(pip_install) --editable '.[dev]'
	@touch $@

run: .venv/installed
	@$(venv_python) -m console model fetch
	@$(venv_python) -m console

test: .venv/installed-dev
	@$(venv_python) -m console model fetch
	@$(venv_python) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# SGLang has an environment of its own here too; on a CPU its kernels run under Triton's interpreter.
SGLANG_TEST_VENV ?= .venv-sglang
sglang_python := $(SGLANG_TEST_VENV)/bin/python
sglang_path := $(CURDIR)/tests/sglang_cpu:$(CURDIR)

.venv-sglang/installed: tests/sglang_cpu/requirements.txt .venv/installed-dev
	$(venv_python) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --disable-pip-version-check --no-deps --requirement $<
	@touch $@

test-sglang: .venv/installed-dev $(SGLANG_TEST_VENV)/installed
	cd tests/sglang_cpu && PYTHONPATH=$(sglang_path) TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 \
	    $(abspath $(sglang_python)) -m pytest -q -p no:cacheprovider --rootdir . -c /dev/null .
	SGLANG_TEST_PYTHON=$(abspath $(sglang_python)) $(venv_python) -m pytest -n 0 -s tests/test_sglang.py

lint: .venv/installed-dev
	$(venv_python) -m ruff check
	$(venv_python) -m ruff format --check
	$(venv_python) -m mypy
	.venv/bin/lint-imports --no-logo --no-cache

bench-check: .venv/installed-dev
	@$(venv_python) -m console model fetch
	@$(venv_python) scripts/bench_check.py

serve-check: .venv/installed-dev
	@$(venv_python) -m console model fetch
	@$(venv_python) scripts/serve_check.py

tune-check: .venv/installed-dev
	@$(venv_python) -m console model fetch
	@$(venv_python) scripts/tune_check.py

auto-check: .venv/installed-dev
	@$(venv_python) -m console model fetch
	@$(venv_python) scripts/auto_check.py

faults: .venv/installed-dev
	@$(venv_python) scripts/faults.py --schedules $(or $(SCHEDULES),500) --first $(or $(FIRST),0)

soak: .venv/installed-dev
	@$(venv_python) scripts/faults.py --soak --minutes $(or $(MINUTES),120)

fuzz: .venv/installed-dev
	@$(venv_python) scripts/fuzz.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0)

coverage: .venv/installed-dev
	@$(venv_python) -m console model fetch
	@rm -f .coverage .coverage.*
	@$(venv_python) -m coverage run -m pytest -n 0 -p tests.followed_ranks
	@$(venv_python) -m coverage combine --quiet
	@$(venv_python) -m coverage report --show-missing

cases: .venv/installed-dev
	@$(venv_python) scripts/cases.py

clean:
	rm -rf .venv .venv-sglang build dist *.egg-info .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
