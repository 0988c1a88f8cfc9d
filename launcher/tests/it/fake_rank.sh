#!/bin/sh
# A fake rank: called as `rank --run-dir DIR --threads N`, behaves as $FAKE_RANK says. Its standard input is the channel.
dir=$3
printf '%s\n' "$$" > "$dir/pid"
[ -z "$7" ] || printf '%s\n' "$$" > "$dir/pid$7"
ticks=0
phase() {
    printf '{"step":%s,"kind":"system","note":"%s","steps":9,"steps_per_s":3.0}\n' "$2" "$1" >> "$dir/system.jsonl"
    ticks=$((ticks + 1))
    printf '{"beat":{"phase":"%s","step":%s,"ticks":%s}}\n' "$1" "$2" "$ticks" >&0
}
fail() { printf '{"failure":{"kind":"%s","phase":"%s","step":%s,"time_ns":1,"message":"%s","because_of":null}}\n' "$1" "$2" "$3" "$4" >&0; }
stop() { printf '{"stopped":"stopped after step 120, which is saved; the same command goes on"}\n' >&0; exit 3; }
alive() { while :; do phase train 1; sleep 0.02; done; }
solve() { printf '{"title":"one","values":{"ci_error":%s,"mmcs":0.99998,"ml2r":0.99,"eval/l0/a":0.5,"eval/l0/b":0.25,"seconds":7.4},"solved":{"found":%s,"means":"CI error 0"}}' "$1" "$2" > "$dir/summary.json"; }
# Waits until the test has seen what is shown; a moment, where no test looks.
seen() { if [ -z "$FAKE_WATCHED" ]; then sleep 0.3; else until [ -e "$FAKE_WATCHED/seen$1" ]; do sleep 0.02; done; fi; }
finish() { printf '{"title":"tiny run","lines":[["steps",9]]}' > "$dir/summary.json"; }

case "$FAKE_RANK" in
done)
    env | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|SLURM_PROCID)=' | sort
    # The launcher reads this file last, so a display of the phase has this row.
    printf '{"step":1,"kind":"train","loss/total":0.5,"l0/linear1":1.5,"l0/linear2":1.0}\n' >> "$dir/metrics.jsonl"
    phase target 3
    seen 1
    printf '{"step":0,"kind":"event","note":"target trained"}\n' >> "$dir/system.jsonl"
    phase train 4
    seen 2
    finish ;;
silent_done) ;;
fail) phase train 4; echo "warming up"; printf '\033[31mred\033[0m\n'; echo "error: loss is NaN at step 5" >&2; exit 1 ;;
panic) echo "thread 'main' panicked at trainer/src/step.rs:3:4:" >&2; echo "index out of bounds" >&2; exit 101 ;;
bad_input) echo "error: data/x: no such dataset" >&2; fail bad_input "" 0 "data/x: no such dataset"; exit 2 ;;
not_finite) phase train 4; fail not_finite train 5 "loss is NaN"; exit 1 ;;
# One of several ranks fails while the others wait for it.
one_*)
    phase train 4
    case "$7 $FAKE_RANK" in
    "2 one_exits") exit 3 ;;
    "2 one_panics") fail bug train 5 "index out of bounds"; exit 101 ;;
    "2 one_aborts") kill -ABRT $$ ;;
    *) alive ;;
    esac ;;
# An exit code without a message.
code_2) exit 2 ;;
killed) kill -9 $$ ;;
polite) trap 'stop' TERM; alive ;;
unsaved) trap 'exit 3' TERM; alive ;;
# After the request it writes to a reader that does not read.
chatty) trap 'echo bye; exit 3' TERM; while :; do seq 100; phase train 1; sleep 0.02; done ;;
stubborn) trap '' TERM; alive ;;
hang) phase train 2; while :; do sleep 0.02; done ;;
flood) yes 'a line that is long enough to be seen' | head -c "${FAKE_BYTES:-20000000}"; finish ;;
crash_loop) mkdir -p "$dir/checkpoints/step-00000005"; echo again >> "$dir/attempts"; exit 1 ;;
crash_on)
    echo $$ >> "$dir/attempts"
    mkdir -p "$dir/checkpoints/step-0000000$(wc -l < "$dir/attempts" | tr -d ' ')"
    exit 1 ;;
# Runs of a sweep: seed 1 finds no solution, seed 2 dies, each prints how many run concurrently.
sweep|sweep_well)
    echo "threads $5, for the target ${7:-$5}" > "$dir/threads"
    phase train 4
    : > "$dir/../running-$$"
    beside() { ls "$dir/.." | grep -c '^running-'; }
    # The first one waits for the concurrent runs, which wait until it has seen them.
    case "$dir" in
    *seed=0) met() { [ "$(beside)" -ge "${FAKE_BESIDE:-1}" ]; } ;;
    *) met() { [ "${FAKE_BESIDE:-1}" = 1 ] || [ -e "$dir/../seed=0/beside" ]; } ;;
    esac
    for _ in $(seq 400); do met && break; sleep 0.05; done
    beside > "$dir/beside"
    sleep 0.3
    rm "$dir/../running-$$"
    case "$FAKE_RANK $dir" in
    "sweep "*seed=2) echo "error: loss is NaN at step 5" >&2; exit 1 ;;
    *seed=1) solve 3 false ;;
    *) solve 0 true ;;
    esac ;;
esac
