# Two commands matter: `make demo` runs the main job, `make test` passes the tests. Both set up what they need.
PYTHON ?= python3
VENV ?= .venv
# A plain `pip install torch` takes the CUDA build on Linux. TORCH_INDEX may name an index with CPU builds
# (https://download.pytorch.org/whl/cpu); TORCH may pin another version within torch>=2.11,<2.14.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
EXTRA ?= cpu
BIN := $(VENV)/bin
SETUP := $(VENV)/.graftline-$(EXTRA)
APT := $(if $(filter 0,$(shell id -u)),apt-get,sudo apt-get)

QUICK := not slow and not cuda

.PHONY: demo test test-kernels test-others test-slow test-compose lint proto setup clean system-packages test-packages

demo: setup
	$(BIN)/graftline demo

test: setup test-packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd proto && ../$(BIN)/buf lint
	$(MAKE) -j2 test-others test-kernels

test-others: setup
	$(BIN)/pytest -q -m "$(QUICK)" --ignore=tests/kernels

# Beside the others, on another core: these wait for nobody. What they print comes as one piece.
test-kernels: setup
	@log=$$(mktemp) && $(BIN)/pytest -q -m "$(QUICK)" tests/kernels >$$log 2>&1; code=$$?; cat $$log; rm $$log; exit $$code

test-slow: setup
	$(BIN)/pytest -q -m "slow and not cuda"

# The images, built and brought up by Docker Compose: needs root and Debian's packages; 10 to 25 minutes.
test-compose: setup
	$(BIN)/python docker/compose_trial.py

lint: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy

proto: setup
	$(BIN)/python proto/generate.py

setup: $(SETUP)

# What Mooncake is linked against, libibverbs even where it moves bytes over TCP.
system-packages:
	@(for name in libcurl.so.4 libibverbs.so.1 libnuma.so.1; do ldconfig -p | grep -q $$name || exit 1; done) || \
		($(APT) update -qq && $(APT) install -y -qq --no-install-recommends libcurl4 libibverbs1 libnuma1)

# A real Prometheus answers the dashboards' questions in the tests.
test-packages:
	@command -v prometheus >/dev/null || ($(APT) update -qq && $(APT) install -y -qq --no-install-recommends prometheus)

$(SETUP): pyproject.toml | system-packages
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install -q -e ".[$(EXTRA),dev]"
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
