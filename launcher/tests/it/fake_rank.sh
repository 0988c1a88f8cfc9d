#!/bin/sh
# Stands in for a rank: called as `rank --run-dir DIR --threads N`, behaves as $FAKE_RANK says.
dir=$3
printf '%s\n' "$$" > "$dir/pid"
phase() { printf '{"step":%s,"kind":"system","note":"%s","steps":9,"steps_per_s":3.0}\n' "$2" "$1" >> "$dir/system.jsonl"; }
alive() { while :; do phase train 1; sleep 0.02; done; }
finish() { printf '{"title":"tiny run","lines":[["steps",9]]}' > "$dir/summary.json"; }

case "$FAKE_RANK" in
done)
    env | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|SLURM_PROCID)=' | sort
    phase target 3
    printf '{"step":1,"kind":"train","loss/total":0.5,"l0/linear1":1.5,"l0/linear2":1.0}\n' >> "$dir/metrics.jsonl"
    sleep 0.3
    printf '{"step":0,"kind":"event","note":"target trained"}\n' >> "$dir/system.jsonl"
    phase train 4
    sleep 0.3
    finish ;;
silent_done) ;;
fail) phase train 4; echo "warming up"; printf '\033[31mred\033[0m\n'; echo "error: loss is NaN at step 5" >&2; exit 1 ;;
panic) echo "thread 'main' panicked at trainer/src/step.rs:3:4:" >&2; echo "index out of bounds" >&2; exit 101 ;;
bad_input) echo "error: data/x: no such dataset" >&2; exit 2 ;;
killed) kill -9 $$ ;;
polite) trap 'exit 3' TERM; alive ;;
stubborn) trap '' TERM; alive ;;
hang) phase train 2; while :; do sleep 0.02; done ;;
flood) yes 'a line that is long enough to be seen' | head -c 20000000; finish ;;
crash_loop) mkdir -p "$dir/checkpoints/step-00000005"; echo again >> "$dir/attempts"; exit 1 ;;
crash_on)
    echo again >> "$dir/attempts"
    mkdir -p "$dir/checkpoints/step-0000000$(wc -l < "$dir/attempts" | tr -d ' ')"
    exit 1 ;;
esac
