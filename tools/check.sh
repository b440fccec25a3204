#!/usr/bin/env bash
# What must hold before a commit: format, lint, types, import contracts, fast tests. `tools/check.sh static`: no tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/install.sh dev
export OMP_NUM_THREADS=1

step() {
    echo "check: $*" >&2
    ".venv/bin/$1" "${@:2}"
}

step ruff format --check .
step ruff check .
step mypy
step python -m pytest -q tests/unit/test_imports.py
[[ ${1:-} == static ]] || step python -m pytest -q tests/unit tests/scheduling
