#!/usr/bin/env bash
# Train a tiny model on BabyAI on this machine, no GPU needed: install, make the model, serve the environment, run the job.
#
#   launch/quickstart.sh [FLAG ...]     flags go to the job: --train.steps 5, --run.seed 1, --dry-run, --help
#
# Exit code: 2 for a wrong flag, else the job's. The job's last lines are the last lines printed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly num_ranks=4 config=configs/quickstart.toml model=models/tiny-babyai
readonly token_file=runs/env-token server_log=runs/env-server.log max_wait_s=60
server_pid="" job_pid=""

stop_server() {
    [[ -n $server_pid ]] || return 0
    kill -TERM "$server_pid" 2>/dev/null || true
    wait "$server_pid" 2>/dev/null || true
}

forward_stop() {
    if [[ -n $job_pid ]]; then
        kill -TERM "$job_pid" 2>/dev/null || true
    else
        exit 130
    fi
}

serve_environment() {
    # The server keeps the job's sessions until the job has ended, so Ctrl-C must not reach it: a session of its own.
    setsid .venv/bin/tiderl env serve babyai --host 127.0.0.1 --port 0 --workers 1 --token-file "$token_file" \
        >"$server_log" 2>&1 &
    server_pid=$!
    local deadline=$((SECONDS + max_wait_s))
    until url=$(grep -oE -m 1 'http://127\.0\.0\.1:[0-9]+' "$server_log") && is_healthy "$url"; do
        if ! kill -0 "$server_pid" 2>/dev/null || ((SECONDS >= deadline)); then
            tail -n 20 "$server_log" >&2
            echo "quickstart: the environment server did not come up; its last lines are above ($server_log)" >&2
            exit 1
        fi
        sleep 0.2
    done
}

is_healthy() {
    .venv/bin/python - "$1/health" "$token_file" <<'PYTHON' 2>/dev/null
import sys, urllib.request
url, token_file = sys.argv[1:]
token = open(token_file).read().strip()
urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=5).close()
PYTHON
}

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
preflight=(env "TIDERL_WORLD_SIZE=$num_ranks" .venv/bin/python -m tiderl.launch --config "$config" --dry-run "$@")
for flag in "$@"; do
    case $flag in --dry-run | --help | -h) exec "${preflight[@]}" ;; esac
done
"${preflight[@]}" >/dev/null

umask 077
mkdir -p runs
if [[ ! -s $token_file ]]; then
    (umask 077 && .venv/bin/python -c 'import secrets; print(secrets.token_urlsafe(32))' >"$token_file")
fi
trap stop_server EXIT
trap forward_stop INT TERM
serve_environment

OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc-per-node "$num_ranks" -m tiderl.launch \
    --config "$config" --env.urls "$url" --env.token-file "$token_file" "$@" &
job_pid=$!
status=0
wait "$job_pid" || status=$?
# A signal ends `wait` before the job has ended.
while kill -0 "$job_pid" 2>/dev/null; do
    status=0
    wait "$job_pid" || status=$?
done
exit "$status"
