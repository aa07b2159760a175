# make test       makes .venv, then lint and every test that needs no GPU
# make build      compiles the kernels in place: fa3/_C.abi3.so and fa3/build_report.json
# make gpu-test   every test that needs a Hopper GPU
# make demo       trains a small GPT, on a Hopper GPU or on the CPU
# make bench      measures against the peers; make lint, make format, make clean
#
# PYTHON=python3   uses that interpreter as it is instead of .venv (it needs torch and, for tests, the extra `test`)
# TORCH=2.11.0     the torch that is installed in a new .venv
# FA3_JOBS=4       compile jobs; FA3_KERNELS=bf16_hdim128 compiles some of the kernels

SHELL := /bin/bash
TORCH ?= 2.14.1
VENV := .venv
LIBRARY := fa3/_C.abi3.so
CPP_FILES = $(shell find $(wildcard csrc tests/host tests/device) -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')

ifeq ($(origin PYTHON),undefined)
PYTHON := $(VENV)/bin/python
ENVIRONMENT := $(VENV)/fa3-torch-$(TORCH).stamp
PIP := $(PYTHON) -m pip --disable-pip-version-check --quiet
CLANG_FORMAT := $(VENV)/bin/clang-format
else
ENVIRONMENT :=
# Nothing is installed into an interpreter that is not ours.
PIP := false
CLANG_FORMAT := clang-format
endif

.PHONY: test build gpu-test demo bench lint format clean

test: $(ENVIRONMENT) lint
	$(PYTHON) -m pytest -m "not gpu"

$(VENV)/fa3-torch-$(TORCH).stamp: pyproject.toml Makefile
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(PIP) install "torch==$(TORCH)" "setuptools>=77"
	$(PIP) install --no-deps "nvidia-cutlass==4.2.*"
	FA3_BUILD_KERNELS=0 $(PIP) install --no-build-isolation --editable ".[dev]"
	rm -f $(VENV)/fa3-torch-*.stamp
	touch $@

# A compiler from PyPI where the machine has none that fits torch.
build: $(ENVIRONMENT)
	FA3_BUILD_KERNELS= $(PYTHON) -m fa3_build.plan || \
	  FA3_BUILD_KERNELS=0 $(PIP) install --no-build-isolation --editable ".[toolkit]"
	FA3_BUILD_KERNELS=1 $(PYTHON) setup.py --quiet build_ext --inplace

HOPPER := $(findstring 9.0,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))

gpu-test: build
	FA3_REQUIRE_GPU=1 $(PYTHON) -m pytest -m gpu

demo: $(if $(HOPPER),build,$(ENVIRONMENT))
	PYTHONPATH=$(CURDIR) $(PYTHON) examples/train_gpt.py

bench: build
	$(PYTHON) -c "import fa3_fwd_interface, flash_attn.cute, matplotlib, tokenizers" || \
	  $(PIP) install --no-build-isolation --editable ".[bench]"
	$(PYTHON) -m benchmarks.bench_forward
	$(PYTHON) -m benchmarks.bench_backward
	$(PYTHON) -m benchmarks.bench_training
	$(PYTHON) -m benchmarks.bench_fp8
	$(PYTHON) -m benchmarks.bench_quantize
	$(PYTHON) -m benchmarks.fp8_accuracy
	$(PYTHON) -m benchmarks.fp8_activations
	$(PYTHON) -m benchmarks.plot benchmarks/results/*/{forward,backward,training,fp8}.json

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(CPP_FILES)

format: $(ENVIRONMENT)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(CLANG_FORMAT) -i $(CPP_FILES)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis $(LIBRARY) fa3/build_report.json
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
