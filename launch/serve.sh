# Sourced by quickstart.sh and emulate.sh: one environment server and one job on this machine, which begin and end together.
#
#   preflight NUM_RANKS CONFIG [FLAG ...]  checks all settings; with --dry-run or --help among the flags, prints and exits
#   make_token
#   serve_environment NAME [FLAG ...]     leaves the server's URL in $url
#   run_job NUM_RANKS CONFIG [FLAG ...]   exits with the job's code; SIGINT and SIGTERM let the job end in order
#
# The caller has set -euo pipefail and stands in the root of the checkout.

readonly token_file=runs/env-token server_log=runs/env-server.log max_wait_s=60
server_pid="" job_pid="" url=""

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

preflight() {
    local flag check=(env "TIDERL_WORLD_SIZE=$1" .venv/bin/python -m tiderl.launch --config "$2" --dry-run "${@:3}")
    for flag in "${@:3}"; do
        case $flag in --dry-run | --help | -h) exec "${check[@]}" ;; esac
    done
    "${check[@]}" >/dev/null
}

make_token() {
    umask 077
    mkdir -p runs
    if [[ ! -s $token_file ]]; then
        .venv/bin/python -c 'import secrets; print(secrets.token_urlsafe(32))' >"$token_file"
    fi
}

is_healthy() {
    .venv/bin/python - "$1/health" "$token_file" <<'PYTHON' 2>/dev/null
import sys, urllib.request
url, token_file = sys.argv[1:]
token = open(token_file).read().strip()
urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=5).close()
PYTHON
}

serve_environment() {
    trap stop_server EXIT
    trap forward_stop INT TERM
    # The server keeps the job's sessions until the job has ended, so Ctrl-C must not reach it: a session of its own.
    setsid .venv/bin/tiderl env serve "$@" --host 127.0.0.1 --port 0 --workers 1 --token-file "$token_file" \
        >"$server_log" 2>&1 &
    server_pid=$!
    local deadline=$((SECONDS + max_wait_s))
    until url=$(grep -oE -m 1 'http://127\.0\.0\.1:[0-9]+' "$server_log") && is_healthy "$url"; do
        if ! kill -0 "$server_pid" 2>/dev/null || ((SECONDS >= deadline)); then
            tail -n 20 "$server_log" >&2
            echo "${0##*/}: the environment server did not come up; its last lines are above ($server_log)" >&2
            exit 1
        fi
        sleep 0.2
    done
}

run_job() {
    local status=0
    OMP_NUM_THREADS=1 .venv/bin/torchrun --standalone --nproc-per-node "$1" -m tiderl.launch \
        --config "$2" --env.urls "$url" --env.token-file "$token_file" "${@:3}" &
    job_pid=$!
    wait "$job_pid" || status=$?
    # A signal ends `wait` before the job has ended.
    while kill -0 "$job_pid" 2>/dev/null; do
        status=0
        wait "$job_pid" || status=$?
    done
    exit "$status"
}
