#!/usr/bin/env bash
# Measure the recorder's overhead and the suggestions of docs/results/suggestions-h100.md, on one GPU or on two, or
# on two the change from ZeRO-2 to ZeRO-3 alone.
#   bash benchmarks/measure_advice.sh build/results one
#   bash benchmarks/measure_advice.sh build/results zero-3
set -u
out=$1
keep=$(mktemp -d)
suggestions() { timeout 170 python benchmarks/suggestions.py "$@" --keep "$keep"; }
if [ "$2" = one ]; then
    {
        timeout 130 python benchmarks/record_overhead.py "$out/overhead.jsonl" --rounds 4 --steps 5
        suggestions "$out/suggestions.jsonl" --jobs 6 \
            --only trainer trainer-checkpointed deepspeed-2 deepspeed-3 ddp ddp-small-batch
        timeout 90 python -m pytest -q -m gpu tests/runs/recording -p no:cacheprovider --basetemp "$keep/pytest" >"$out/pytest.txt" 2>&1
        tar -czf "$out/recordings.tar.gz" -C "$keep" .
    } >"$out/log.txt" 2>&1
elif [ "$2" = zero-3 ]; then
    suggestions "$out/two.jsonl" --changes zero-3 --only deepspeed-2-two-ranks >"$out/log-two.txt" 2>&1
else
    {
        suggestions "$out/two.jsonl" --jobs 3 --changes shard-optimizer shard-model bucket-views \
            --only ddp-two-ranks ddp-two-ranks-small-batch
        suggestions "$out/two.jsonl" --jobs 3 --changes zero-3 --only deepspeed-2-two-ranks
        tar -czf "$out/recordings-two.tar.gz" -C "$keep" .
    } >"$out/log-two.txt" 2>&1
fi
