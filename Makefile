# make help says what there is. PYTHON=python3.12 chooses the interpreter of the virtual environment.
PYTHON ?= python3
INSTALLED := .venv/.installed
# By a process more than there are cores, since tests wait a third of the time. File by file: the tests of a file share
# what its fixtures made. In the order of `testpaths` in pyproject.toml.
# On the CPU, also beside a GPU: tests fork processes, which CUDA does not permit. `make gpu-check` runs those marked gpu.
PYTEST := CUDA_VISIBLE_DEVICES= .venv/bin/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
NOT_BY_HAND := -m 'not slow and not contract'

.PHONY: help setup quickstart federation test checks golden lint contracts matrix docs evidence peers commands bench gpu-check pictures clean

help:
	@echo 'make quickstart   train a small Llama with 4 replicas on this machine (5 minutes on 2 cores)'
	@echo 'make federation   three replicas as separate jobs; one is killed and comes back (1 minute)'
	@echo 'make test         all tests but those marked slow or contract'
	@echo 'make checks       what to run before a commit: make lint, the unit tests, make docs'
	@echo 'make golden       write anew what tests compare messages with, in tests/golden/; review the difference'
	@echo 'make lint         ruff, its formatter, import-linter and mypy'
	@echo 'make contracts    what the code relies on in Megatron-core and DeepSpeed; after a change of versions'
	@echo 'make matrix       the supported versions of the engines together, in environments of their own (hours, 6 GB each)'
	@echo 'make docs         the documentation as a site, in site/; fails where a link leads nowhere'
	@echo 'make gpu-check    what a GPU is to prove, in runs/gpu-check; goes on where it stopped; STAGES="quickstart memory": these alone'
	@echo 'make evidence     shorter versions of the studies of docs/evidence.md, in runs/evidence (half an hour)'
	@echo 'make peers        the same work with torchft, and what plan predicts on slow links; root (half an hour)'
	@echo 'make commands     each command that README, docs and --help name, in a fresh clone, in runs/commands (half an hour)'
	@echo 'make bench        ratios of the speed to that of the commit AGAINST=..., as JSON; on an idle machine (10 minutes)'
	@echo 'make pictures     the pictures of docs/ that show a run, of a federation that it runs; needs chromium (3 minutes)'
	@echo 'make setup        make .venv and install requirements.txt; the others do it when needed'
	@echo 'make clean        remove .venv and caches; runs/ stays'

setup: $(INSTALLED)

$(INSTALLED): requirements.txt
	@PYTHON='$(PYTHON)' sh launch/setup.sh

quickstart: $(INSTALLED)
	@PYTHON='$(CURDIR)/.venv/bin/python' sh launch/quickstart.sh

federation: $(INSTALLED)
	@PYTHON='$(CURDIR)/.venv/bin/python' sh launch/federation.sh

test: $(INSTALLED)
	@$(PYTEST) $(NOT_BY_HAND) --durations=12 --durations-min=8

checks: lint
	$(PYTEST) -q $(NOT_BY_HAND) tests/repository tests/refusals tests/parts tests/theorems
	@$(MAKE) --no-print-directory docs

golden: $(INSTALLED)
	GOLDEN=write .venv/bin/python -m pytest -q $$(grep -rl --include='test_*.py' 'golden import check' tests)

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/mypy

contracts: $(INSTALLED)
	.venv/bin/python -m pytest -q -m contract

matrix: $(INSTALLED)
	@.venv/bin/python -m tools.matrix

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

evidence: $(INSTALLED)
	@PYTHON='$(CURDIR)/.venv/bin/python' sh launch/evidence.sh

peers: $(INSTALLED)
	@.venv/bin/python -m tools.peers

commands: $(INSTALLED)
	@.venv/bin/python -m tools.commands

bench: $(INSTALLED)
	@.venv/bin/python -m tools.bench against '$(AGAINST)'

gpu-check: $(INSTALLED)
	@.venv/bin/python -m tools.gpu_check $(if $(STAGES),--only $(STAGES))

pictures: $(INSTALLED)
	@.venv/bin/python -m tools.pictures docs

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
