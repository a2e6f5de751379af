PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PRIMARY := 0.5.23
HOSTS ?= 0.5.12.post1 0.5.17 $(PRIMARY)

SANITIZED := tests/kernels -k "new_page or context_limit or one_long or empty or refuses or joined or random_rows or equal_bits or fp8_cache or (choices_of_a_layer and 1-) or ((norms or queries or values) and 9-) or norms_of_more_rows"

.PHONY: setup demo test test-all test-hosts test-gpu sanitize lint bench docs

setup: $(VENV)/.ready  ## SGLang, this package in place, and what the tests need (11 GB, 4 to 6 minutes)

$(VENV)/.ready: pyproject.toml
	@echo "Installing SGLang $(PRIMARY) with torch and its kernels into $(VENV): 11 GB, 4 to 6 minutes, and pip is silent meanwhile"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[test,host-$(subst .,-,$(PRIMARY))]"
	touch $@

demo: setup  ## decode speculatively on the CPU
	$(BIN)/python -W ignore -m nsa_backend demo

# A file's tests stay in one process, which SGLang and its state are loaded into once. Torch's threads would wait for each other.
TOGETHER := -n 2 --dist loadfile
test test-all: export OMP_NUM_THREADS := 1

test: setup  ## what needs no GPU, in 5 minutes on two cores; kernels run through Triton's interpreter
	$(BIN)/python -m pytest -q $(TOGETHER)

test-all: setup  ## what `make test` leaves out: slow tests, and properties with all of their examples
	$(BIN)/python -m pytest -q $(TOGETHER) -m "(slow or hypothesis) and not gpu" --hypothesis-profile=full

test-hosts: $(HOSTS:%=.venv-hosts/%/.ready)  ## the same tests on each of these SGLang releases (9 to 11 GB and 4 to 6 minutes each, once)
	for release in $(HOSTS); do echo "SGLang $$release"; .venv-hosts/$$release/bin/python -m pytest -q -m "not gpu" --hypothesis-profile=full tests/releases || exit 1; done

# transformers 5.6.0, which 0.5.12.post1 pins, does not import with kernels 0.13
.venv-hosts/0.5.12.post1/.ready: KERNELS := "kernels<0.13"

.venv-hosts/%/.ready: pyproject.toml
	@echo "Installing SGLang $* with torch and its kernels into .venv-hosts/$*: 9 to 11 GB, 4 to 6 minutes, and pip is silent meanwhile"
	$(PYTHON) -m venv .venv-hosts/$*
	.venv-hosts/$*/bin/pip install --quiet sglang==$* pytest hypothesis rich $(KERNELS)
	.venv-hosts/$*/bin/pip install --quiet --no-deps --editable .
	touch $@

test-gpu:  ## on an H200 with SGLang installed; see tests/e2e/run_all.py for the engine runs
	python3 -m pytest -q -m gpu tests/kernels tests/gpu

sanitize:  ## on an H200: our kernels under NVIDIA's checkers of memory, initialisation and races
	# torch's caching allocator would hide an access past a tensor inside one of its blocks
	# what torch and Triton ask the driver and are refused is no access to memory
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python3 -m pytest -q -m gpu $(SANITIZED)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool initcheck --error-exitcode 1 python3 -m pytest -q -m gpu $(SANITIZED)
	# sparse_verify.cu says which of its accesses racecheck takes for races, and on what their order stands
	compute-sanitizer --tool racecheck --error-exitcode 1 python3 -m pytest -q -m gpu $(SANITIZED) --ignore tests/kernels/test_sparse_verify.py

bench:  ## on an H200: what a change of the hot path is measured by, half an hour; docs/contributing.md says where reports go
	for what in metadata attention draft serve; do \
		python3 -m nsa_backend bench $$what --minutes 20 --out $$what.json || exit 1; done

docs: setup  ## the generated tables of README and docs, from the code and from benchmarks/results
	$(BIN)/python -W ignore docs/tables

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
