#!/usr/bin/env bash
# Everything that a first hour on a GPU is for, in order of value; what is written when it ends early is there.
#
#     bench/first_device.sh [--dry-run] [--list] [OUT]         default OUT: bench/results/first_device
#
# Each step has a time limit and goes on alone: one that fails or hangs costs itself.  OUT/STEP.log is what it printed,
# OUT/*.json its results, OUT/steps.jsonl a line a step as it ends.  Exit status 1 if a step failed.
#
# The limits of all steps are 55 minutes together.  --dry-run runs the same command lines without a GPU: each must parse,
# import all that it needs, and either do its part on CPUs or say that it needs a device.  --list prints the command lines.
set -uo pipefail
cd "$(dirname "$0")/.."
mode=run
while [[ ${1-} == --* ]]; do
    case $1 in
        --dry-run) mode=dry ;;
        --list) mode=list ;;
        *) echo "first_device.sh: unknown option $1" >&2; exit 2 ;;
    esac
    shift
done
python=${PYTHON:-python3}
[[ -z ${PYTHON-} && -x .venv/bin/python ]] && python=.venv/bin/python
export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}
[[ $mode == dry ]] && export CUDA_VISIBLE_DEVICES=""
if [[ $mode == list ]]; then devices=2; out=OUT; else
    devices=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 1
    if [[ $mode == run && $devices == 0 ]]; then
        echo "first_device.sh: there is no GPU; nothing was measured (--dry-run checks the steps)" >&2
        exit 2
    fi
    if [[ $mode == dry ]]; then out=${1:-$(mktemp -d)}; else out=${1:-bench/results/first_device}; fi
    mkdir -p "$out"
    : >"$out/steps.jsonl"
fi
failed=0

# step NAME SECONDS COMMAND...
step() {
    local name=$1 limit=$2 verdict=ok status begin=$SECONDS
    shift 2
    if [[ $mode == list ]]; then echo "$name $limit $*"; return; fi
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null
    status=$?
    if [[ $status == 124 || $status == 137 ]]; then
        verdict="out of time"
    elif [[ $status != 0 ]]; then
        verdict=failed
        # What needs a device says so, in words; a wrong command line ends with the same status.
        if [[ $mode == dry && $status == 2 ]] && grep -qE "nothing was measured|no GPU to measure on" "$out/$name.log"; then
            verdict="needs a device"
        fi
    fi
    [[ $verdict == ok || $verdict == "needs a device" ]] || failed=1
    printf '{"step": "%s", "verdict": "%s", "status": %d, "seconds": %d, "limit": %d}\n' \
        "$name" "$verdict" "$status" $((SECONDS - begin)) "$limit" >>"$out/steps.jsonl"
    printf '%-18s %-16s %4d s\n' "$name" "$verdict" $((SECONDS - begin))
    if [[ $verdict == failed ]]; then tail -n 15 "$out/$name.log" | sed 's/^/    /'; fi
}

tests() { # NAME SECONDS FILES AND OPTIONS...
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" -m pytest -p no:cacheprovider -m gpu --timeout 200 "$@"
}

# Sizes of a step against torch; those of a dry run take seconds on CPUs.
tokens=(2048 8192 32768)
block=(--hidden 4096 --ffn 14336 --dtype bf16) shares=(--largest 64 --repeats 5)
models=("*") programs=80
ranks=$devices
if [[ $mode == dry ]]; then
    tokens=(64)
    block=(--hidden 16 --ffn 32 --dtype bf16 --rounds 1 --warmup 1) shares=(--largest 0.01 --repeats 1)
    models=(none) programs=0  # the tests have some
    ranks=2
fi
seconds=900 folders=($(sed -n 's/^ON_DEVICE = //p' Makefile))
[[ $mode == dry ]] && seconds=100 folders=(compute/test_grouped.py)
ours=("$python" -m ndtp)
launched=("$python" -m torch.distributed.run --standalone "--nproc-per-node=$ranks")
all=("${launched[@]}" -m ndtp)

check() { # NAME SECONDS, see bench/device_checks.py
    step "$1" "$2" "${launched[@]}" bench/device_checks.py "$1" --out "$out/$1.json"
}

# The tests whose tensors lie on the GPU, as `make test DEVICE=cuda`; what the time does not suffice for is listed.
suite() { # SECONDS
    local device=cuda
    [[ $mode == dry ]] && device=
    step suite "$1" env "NDTP_TEST_DEVICE=$device" "$python" tests/on_device.py --seconds "$seconds" \
        --out "$out/suite.json" "${folders[@]/#/tests/}"
}

# Four ranks of NCCL on one device, which runs kernels of several processes at once where MPS is there.
shared() { # NAME SECONDS COMMAND...
    local name=$1 limit=$2
    shift 2
    [[ $mode == dry ]] || set -- env NDTP_TEST_DEVICE=cuda "$@"
    step "$name" "$limit" "$@"
}
mps() { # start | quit
    [[ $mode == run ]] && command -v nvidia-cuda-mps-control >/dev/null || return 0
    export CUDA_MPS_PIPE_DIRECTORY=$out/mps CUDA_MPS_LOG_DIRECTORY=$out/mps
    mkdir -p "$out/mps"
    case $1 in
        start) timeout 10 nvidia-cuda-mps-control -d </dev/null >/dev/null 2>&1 ;;
        quit)
            echo quit | timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1
            unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
            rm -rf "$out/mps"
            ;;
    esac
}

step info 30 "${ours[@]}" info --json "$out/info.json"
if [[ $mode == dry ]]; then # in one launch
    step checks 120 "${launched[@]}" bench/device_checks.py topology captured endurance host beside bandwidth memory
else
    check topology 30
    suite 930
    tests tests_cuda 150 tests/test_cuda.py
    check captured 180
    check endurance 180
    check host 60
fi
if [[ $ranks -ge 2 ]]; then
    for count in "${tokens[@]}"; do
        step "step_$count" 90 "${all[@]}" bench step --compare torch --tokens "$count" "${block[@]}" --json "$out/step_$count.json"
    done
else
    echo "step, calibrate, planner: left out, one device"
fi
if [[ $mode == dry ]]; then
    tests tests_cuda 150 tests/test_cuda.py
    suite 180
else
    check beside 60
    check bandwidth 60
    check memory 30
fi
mps start
shared programs 60 "$python" tests/split/programs.py --programs "$programs" --ranks 4 --json "$out/programs.json"
shared models 120 "$python" tests/models/elsewhere.py --models "${models[@]}" --json "$out/models.json"
mps quit
tests tests_on_device 60 tests/kernels/test_on_device.py
tests tests_symmetric 60 tests/collectives/test_symmetric.py tests/collectives/test_recorder.py
step symmetric 60 "$python" bench/symmetric.py --out "$out/symmetric.json"
if [[ $ranks -ge 2 ]]; then
    step calibrate 150 "${all[@]}" bench calibrate --dtype bf16 "${shares[@]}" --output "$out/hardware.toml"
    step planned 90 "${all[@]}" bench step --tokens "${tokens[-1]}" "${block[@]}" --hardware "$out/hardware.toml" \
        --json "$out/planned.json"
    step planner 20 "$python" bench/planner_verdict.py "$out/planned.json"
fi
step gemm 270 "$python" bench/gemm.py --all --seconds 240 --out "$out/gemm.json"
step grouped_gemm 120 "$python" bench/grouped_gemm.py --seconds 100 --out "$out/grouped_gemm.json"
step tuning 120 "${ours[@]}" bench gemm --tune --json "$out/tuning.json"
tests tests_fabric 60 tests/measure/test_bench_fabric.py
step fabric 90 "$python" bench/fabric.py --hardware h200-ib --out "$out/fabric.json"
[[ $mode == list ]] || echo "results in $out"
exit $failed
