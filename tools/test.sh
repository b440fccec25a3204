#!/usr/bin/env bash
# Install what the tests need and run them, the fast ones first. Arguments go to pytest.
#
#   tools/test.sh                 everything that needs no GPU
#   tools/test.sh -m gpu          what needs one
#   tools/test.sh tests/unit -k codec
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/install.sh dev

# Several ranks share few cores: more threads a process make everything slower.
export OMP_NUM_THREADS=1
selection=()
has_path=false
has_marker=false
for argument in "$@"; do
    case $argument in
        tests | tests/* | */tests/*) has_path=true ;;
        -m | -m*) has_marker=true ;;
    esac
done
$has_marker || selection+=(-m "not gpu")
if ! $has_path; then
    for folder in unit scheduling replay conformance integration; do
        [[ -z $(find "tests/$folder" -name 'test_*.py' -print -quit 2>/dev/null) ]] || selection+=("tests/$folder")
    done
    if $has_marker && [[ -d tests/gpu ]]; then selection+=(tests/gpu); fi
fi
exec .venv/bin/python -m pytest "${selection[@]}" "$@"
