#!/usr/bin/env bash
# Train a tiny model on BabyAI on this machine, no GPU needed: install, make the model, serve the environment, run the job.
#
#   launch/quickstart.sh [FLAG ...]     flags go to the job: --train.steps 5, --run.seed 1, --dry-run, --help
#
# Exit code: 2 for a wrong flag, else the job's. The job's last lines are the last lines printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/serve.sh

readonly num_ranks=4 config=configs/quickstart.toml model=models/tiny-babyai

launch/install.sh

if [[ ! -d $model ]]; then
    echo "quickstart: making $model" >&2
    # Made beside its place and moved there, so that a model folder is always a whole one.
    rm -rf "$model.partial"
    mkdir -p "$(dirname "$model")"
    OMP_NUM_THREADS=1 .venv/bin/tiderl model tiny --env babyai --out "$model.partial"
    mv "$model.partial" "$model"
fi

# Wrong flags end here, before anything is started.
preflight "$num_ranks" "$config" "$@"
make_token
serve_environment babyai
run_job "$num_ranks" "$config" "$@"
