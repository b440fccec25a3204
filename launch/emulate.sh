#!/usr/bin/env bash
# Run a job of emulated ranks on this machine: the live system, with only the compute replaced by the time that it would take.
#
#   launch/emulate.sh NUM_RANKS CONFIG [FLAG ...]     such as: launch/emulate.sh 8 configs/emulated/text7b_8.toml --train.steps 5
#
# Serves the environment that the settings name, at their time scale. Exit code: 2 for a wrong flag, else the job's.
set -euo pipefail
if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "emulate.sh: expected a number of ranks, a config and flags: launch/emulate.sh 8 configs/emulated/text7b_8.toml" >&2
    exit 2
fi
# From where the user stands; that there is such a file is for the settings to check.
config=$(realpath --canonicalize-missing -- "$2")
readonly num_ranks=$1 config
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/serve.sh

launch/install.sh

# Wrong flags end here, before anything is started.
preflight "$num_ranks" "$config" "$@"

# The settings as the job will have them: files and flags.
served=$(.venv/bin/python - --config "$config" "$@" <<'PYTHON'
import json, sys
from tiderl.config.load import load

config = load(sys.argv[1:]).config
print(config.env.name, json.dumps({"time_scale": config.emulate.time_scale}, separators=(",", ":")))
PYTHON
)

make_token
# An emulated session is a few numbers: there is room for as many as the ranks can play.
serve_environment "${served% *}" --options "${served##* }" --capacity 8192
run_job "$num_ranks" "$config" "$@"
