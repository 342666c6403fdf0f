#!/bin/bash
# Starts a run again until it is done, on one machine without a scheduler.
#
#   examples/restart-loop.sh torchrun --nproc-per-node 8 -m perdure train run.yaml
#   TRIES=20 PAUSE=30 examples/restart-loop.sh perdure train run.yaml
#
# The command must resume by itself: `checkpoint: {auto_resume: true, ...}` in run.yaml. A fresh torchrun each
# time is the sure way: nothing of the start before is left. Ctrl-C or SIGTERM stops the run, saved, and the loop.
#
# perdure says by its exit code whether trying again can help: 0 done, 1 failed; 2 the configuration is wrong,
# 10 there is no such checkpoint, 11 it is of a newer version, 12 another run holds the directory; 130, 138 and 143
# stopped by a signal. torchrun hides all of these behind 1, so the loop also gives up when tries bring no new
# checkpoint (set ROOT to the run's save path).

set -u
[ $# -gt 0 ] || { echo "usage: $0 COMMAND..." >&2; exit 2; }
tries=${TRIES:-100} pause=${PAUSE:-10} root=${ROOT:-./output/checkpoint}
export PERDURE_RANK_DEADLINE=${PERDURE_RANK_DEADLINE:-60}

stopped=""
trap 'stopped=INT; kill -s INT "$job" 2>/dev/null' INT
trap 'stopped=TERM; kill -s TERM "$job" 2>/dev/null' TERM

newest() { cat "$root/latest_checkpointed_iteration.txt" 2>/dev/null; }

fruitless=0
for ((try = 1; try <= tries; try++)); do
    before=$(newest)
    set -m # a process group of its own: a Ctrl-C reaches it once, through us
    "$@" &
    job=$!
    set +m
    while :; do
        wait "$job"
        code=$?
        kill -0 "$job" 2>/dev/null || break
    done
    case $code in
    0) exit 0 ;;
    2 | 10 | 11 | 12) exit "$code" ;;
    esac
    [ -z "$stopped" ] || exit "$code"
    if [ "$(newest)" = "$before" ]; then fruitless=$((fruitless + 1)); else fruitless=0; fi
    if [ "$fruitless" -ge 3 ]; then
        echo "$0: three tries in a row brought no new checkpoint below $root; giving up (exit code $code)" >&2
        exit "$code"
    fi
    echo "$0: exit code $code; try $((try + 1)) of $tries in $pause s" >&2
    sleep "$pause"
done
exit "$code"
