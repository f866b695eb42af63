#!/usr/bin/env bash
# What two H200 are needed for, in about five minutes: times first, each alone; then what measures only memory, together.
#   bash benchmarks/measure_two_gpus.sh build/results
set -u
out=$1
mkdir -p "$out"
python=${PYTHON:-python}
export OMP_NUM_THREADS=8
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

# DeepSpeedCPUAdam is compiled by the CPU while the first parts run
part 120 cpu-adam nice "$python" -c 'import torch; from deepspeed.ops.adam import DeepSpeedCPUAdam as Adam; Adam([torch.nn.Parameter(torch.zeros(8))])' &
compiled=$!
CUDA_VISIBLE_DEVICES=0 part 60 ledger "$python" -m ligerprof step --batch 2 --liger all --repeats 2 --no-trace --json -o "$out/ledger"
rm -rf "$out/ledger"
part 70 times "$python" benchmarks/ranks.py measure "$out/ranks.jsonl" --parts rows,times --engine ddp --first 1 --seconds 60

export OMP_NUM_THREADS=4
# several of these at a time fill a GPU
pids=()
part 110 ddp "$python" benchmarks/ranks.py measure "$out/ddp.jsonl" --engine ddp --apart 3 & pids+=($!)
part 110 static-graph "$python" benchmarks/ranks.py measure "$out/static-graph.jsonl" --static-graph \
    --recipe '{"model":"gpt2","batch":4,"precision":"amp","engine":"ddp","gpus":2}' --apart 1 & pids+=($!)
wait "${pids[@]}"

wait "$compiled"
configs="$python benchmarks/framework_configs.py measure"
pids=()
CUDA_VISIBLE_DEVICES=1 part 110 configs-one $configs "$out/configs-one.jsonl" --only zero,ds_config & pids+=($!)
part 110 configs-two $configs "$out/configs-two.jsonl" --only zero,ds_config --gpus 2 & pids+=($!)
part 110 tests "$python" -m pytest -q -m gpu tests/runs/parallel -p no:cacheprovider --basetemp "$(mktemp -d)/pytest" & pids+=($!)
part 110 suggestions bash benchmarks/measure_advice.sh "$out" zero-3 & pids+=($!)
part 110 zero "$python" benchmarks/zero.py measure "$out/zero.jsonl" --gpus 2 & pids+=($!)
wait "${pids[@]}"

export OMP_NUM_THREADS=12
# 16 x 1024 under ZeRO-3: both kernels at once, a GPU each, then the other way round
zero_step() {
    CUDA_VISIBLE_DEVICES=$2 part 80 "zero3-$1-gpu$2" "$python" -m ligerprof step --engine deepspeed --precision mixed-fp16 \
        --zero 3 --offload all --batch 16 --liger all --provider "$1" --warmup 2 --repeats 7 --no-trace --json -o "$out/zero3-$1-gpu$2"
    rm -rf "$out/zero3-$1-gpu$2"
}
zero_step ligerprof 0 & one=$!
zero_step liger 1 & two=$!
wait "$one" "$two"
zero_step ligerprof 1 & one=$!
zero_step liger 0 & two=$!
wait "$one" "$two"
say "done"
