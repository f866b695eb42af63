#!/usr/bin/env bash
# What two H200 are needed for: the groups after the folder, in their order, or all of them in about eight minutes.
#   bash benchmarks/measure_two_gpus.sh build/results
#   bash benchmarks/measure_two_gpus.sh build/results zero ddp
# `turns` and `ddp` have the GPUs for themselves; what measures only memory runs together.
set -u
out=$1
shift
mkdir -p "$out"
python=${PYTHON:-python}
began=$SECONDS
say() { echo "$((SECONDS - began)) s: $*" | tee -a "$out/log.txt"; }
# part SECONDS NAME COMMAND...: its output is NAME.txt; NAME.json if the command prints JSON
part() {
    local limit=$1 name=$2 from=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>"$out/$name.err"
    local code=$?
    say "$name: exit $code after $((SECONDS - from)) s: $(tail -n 1 "$out/$name.txt" | tail -c 200)"
}
zero_rows() {
    part 150 "zero-$1" "$python" benchmarks/zero.py measure "$out/zero.jsonl" --gpus 2 --rows "$2" "${@:3}"
}
gpu_tests() {
    part 110 tests "$python" -m pytest -q -m gpu tests/runs/parallel -p no:cacheprovider --basetemp "$(mktemp -d)/pytest"
}

# one H200's ledger, and times of FSDP2's steps
turns() {
    export OMP_NUM_THREADS=8
    CUDA_VISIBLE_DEVICES=0 part 60 ledger "$python" -m ligerprof step --batch 2 --liger all --repeats 2 --no-trace --json -o "$out/ledger"
    rm -rf "$out/ledger"
    part 70 times "$python" benchmarks/ranks.py measure "$out/ranks.jsonl" --parts rows,times --engine ddp --first 1 --seconds 60
}

# one at a time: the peaks of DDP depend on when NCCL's watchdog lets go of buckets
ddp() {
    export OMP_NUM_THREADS=8
    part 230 ddp "$python" benchmarks/ranks.py measure "$out/ddp.jsonl" --engine ddp --apart 1
    part 60 static-graph "$python" benchmarks/ranks.py measure "$out/static-graph.jsonl" --static-graph \
        --recipe '{"model":"gpt2","batch":4,"precision":"amp","engine":"ddp","gpus":2}' --apart 1
}

# the losses of two GPUs, and ZeRO: what was simulated with a difference, offload, stage 0, adapters
zero() {
    export OMP_NUM_THREADS=4
    local pids=()
    gpu_tests & pids+=($!)
    zero_rows again again --keep "$out/recordings" & pids+=($!)
    zero_rows plain stage-0,lora & pids+=($!)
    wait "$compiled"
    zero_rows offloaded offload-few,offload-more & pids+=($!)
    wait "${pids[@]}"
}

# configurations of other frameworks, ZeRO with other models, and the change from ZeRO-2 to ZeRO-3
frameworks() {
    export OMP_NUM_THREADS=4
    wait "$compiled"
    local configs="$python benchmarks/framework_configs.py measure" pids=()
    CUDA_VISIBLE_DEVICES=1 part 110 configs-one $configs "$out/configs-one.jsonl" --only zero,ds_config & pids+=($!)
    part 110 configs-two $configs "$out/configs-two.jsonl" --only zero,ds_config --gpus 2 & pids+=($!)
    part 110 suggestions bash benchmarks/measure_advice.sh "$out" zero-3 & pids+=($!)
    zero_rows others others-1,others-2,others-3 & pids+=($!)
    wait "${pids[@]}"
}

zero_step() {
    CUDA_VISIBLE_DEVICES=$2 part 80 "zero3-$1-gpu$2" "$python" -m ligerprof step --engine deepspeed --precision mixed-fp16 \
        --zero 3 --offload all --batch 16 --liger all --provider "$1" --warmup 2 --repeats 7 --no-trace --json -o "$out/zero3-$1-gpu$2"
    rm -rf "$out/zero3-$1-gpu$2"
}
# 16 x 1024 under ZeRO-3: both kernels at once, a GPU each, then the other way round
large() {
    export OMP_NUM_THREADS=12
    wait "$compiled"
    local one two
    zero_step ligerprof 0 & one=$!
    zero_step liger 1 & two=$!
    wait "$one" "$two"
    zero_step ligerprof 1 & one=$!
    zero_step liger 0 & two=$!
    wait "$one" "$two"
}

# DeepSpeedCPUAdam is compiled by the CPU while the first group runs
export OMP_NUM_THREADS=8
part 120 cpu-adam nice "$python" -c 'import torch; from deepspeed.ops.adam import DeepSpeedCPUAdam as Adam; Adam([torch.nn.Parameter(torch.zeros(8))])' &
compiled=$!
[ $# -gt 0 ] || set -- turns zero ddp frameworks large
for group; do "$group"; done
wait "$compiled"
say "done"
