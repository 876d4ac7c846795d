# Two commands, from a fresh clone, with or without a GPU:
#   make demo    install into .venv and run the first example
#   make test    install into .venv and run every check
# PYTHON=python3.12 picks the interpreter (3.10 or newer).

PYTHON ?= python3
INSTALLED := .venv/.installed

.PHONY: demo test install clean

demo: $(INSTALLED)
	.venv/bin/python examples/01_matmul_reduce_scatter.py

test: $(INSTALLED)
	./check

install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py constraints.txt scripts/install.sh $(wildcard csrc/*)
	PYTHON="$(PYTHON)" bash scripts/install.sh .venv
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info pk/_C*.so .pytest_cache .mypy_cache .ruff_cache
