#!/usr/bin/env bash
# Install TideRL and what it needs into .venv of this checkout. Runs in a moment when everything is there already.
#
#   launch/install.sh [EXTRA ...]     such as: launch/install.sh dev megatron
#
# Always installed: the engine and torch (extra `cuda` where nvidia-smi finds a GPU, else `cpu`) and the BabyAI environment.
# PYTHON chooses the interpreter for a new .venv; pip is configured as always (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly log=.venv/install.log
# Where the CPU build of torch is published, should pip not find it on its own index.
readonly torch_cpu_index=https://download.pytorch.org/whl/cpu

fail() {
    printf 'install: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        # A pyenv shim exists for versions that do not run here: only a run tells.
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 with the venv module found; install one (python3.11 and python3.11-venv) or set PYTHON"
}

run_pip() {
    .venv/bin/python -m pip "$@" >>"$log" 2>&1
}

pip_install() {
    run_pip install --editable "$1" && return
    [[ $backend == cpu ]] || return 1
    echo "install: pip failed, once more with PyTorch's CPU index ($torch_cpu_index)" >&2
    PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:-} $torch_cpu_index" run_pip install --editable "$1"
}

backend=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    backend=cuda
fi
extras=("$backend" env-babyai "$@")

if [[ ! -x .venv/bin/python ]]; then
    python=$(find_python)
    echo "install: new .venv with $("$python" --version)" >&2
    "$python" -m venv .venv || fail "$python cannot make .venv; install its venv module, or set PYTHON"
fi
.venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail ".venv holds $(.venv/bin/python --version), TideRL needs 3.11 or newer; remove .venv and try again"

# One stamp an extra, so that a later run with fewer extras has nothing to do.
hash=$(sha256sum pyproject.toml | cut -d' ' -f1)
missing=()
for extra in "${extras[@]}"; do
    [[ $(cat ".venv/tiderl-$extra.stamp" 2>/dev/null) == "$hash" ]] || missing+=("$extra")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

joined=$(IFS=,; echo "${extras[*]}")
echo "install: tiderl[$joined] into .venv, some minutes the first time (log: $log)" >&2
: >"$log"
if ! pip_install ".[$joined]"; then
    tail -n 20 "$log" >&2
    fail "pip failed, its last lines are above and all of them in $log; check the network or pip's index and try again"
fi
if [[ $backend == cpu ]]; then
    # PyPI's torchvision does not fit the CPU build of torch and breaks the import of transformers; nothing here needs them.
    run_pip uninstall --yes torchvision torchaudio torchcodec || fail "pip could not remove torchvision; see $log"
fi
for extra in "${extras[@]}"; do
    printf '%s\n' "$hash" >".venv/tiderl-$extra.stamp"
done
echo "install: done" >&2
