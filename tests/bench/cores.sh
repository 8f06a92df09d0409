#!/bin/sh
# Measures what this processor does on all of its cores, in at most 8 minutes, and writes one file
# of text, build/cores.txt: GPT-2's training step on ranks x threads, products, prompts and decoding,
# in f32 and bf16, beside PyTorch and llama.cpp where they are.
#
#     sh tests/bench/cores.sh [SECONDS]               # 480 unless told; compiling counts
#     sh tests/bench/cores.sh --static                # only compiles, for another machine
#     sh tests/bench/cores.sh --compiled [SECONDS]    # with the programs of --static
#
# It needs python3 and nothing else. --static puts programs into build/bench that need no library:
# copy the folder of the project, with build/bench, to a machine that has no C compiler (--compiled
# goes without saying there) or whose minutes are few: compiling takes one. PyTorch is that of
# $BENCH_PYTHON, of build/venv or of python3; if none has it, pip installs it into build/venv within
# 90 seconds, or its rows are left out.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=build/cores.txt
torch=2.13.0

compiled=
case "${1:-}" in
--compiled)
    compiled=--compiled
    shift
    ;;
--static)
    exec python3 tests/bench/run.py --only cores --static
    ;;
-*)
    sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0"
    test "$1" = --help
    exit
    ;;
esac
begin=$(date +%s)
end=$((begin + ${1:-480}))
mkdir -p build

left() {
    echo $((end - $(date +%s)))
}

has_torch() {
    "$1" -c 'import torch' 2>/dev/null
}

# The Python that runs the peers, with PyTorch if that can be had.
find_python() {
    for python in ${BENCH_PYTHON:-build/venv/bin/python python3}; do
        has_torch "$python" && return
    done
    test -n "${BENCH_PYTHON:-}" && return
    python=build/venv/bin/python
    timeout 90 sh -c "python3 -m venv build/venv &&
        $python -m pip install --quiet --retries 1 torch==$torch numpy" >build/cores.pip 2>&1
    has_torch "$python" && return
    echo "PyTorch cannot be installed: $(tail -n 1 build/cores.pip)"
    python=python3
}

describe() {
    echo "date       $(date -u '+%Y-%m-%d %H:%M') UTC"
    echo "commit     $(git describe --always --dirty 2>/dev/null || echo unknown)"
    echo "header     $(cksum <tshard.h)"
    echo "system     $(uname -srm), $(sed -n 's/^MemAvailable: *//p' /proc/meminfo) of memory free"
    lscpu | grep -E '^(CPU\(s\)|Model name|CPU family|Model|Stepping|Thread|Core|Socket|L[123]|NUMA)'
    echo "flags      $(grep -m 1 '^flags' /proc/cpuinfo | tr ' ' '\n' |
        grep -E '^(avx|fma|amx|f16c)' | tr '\n' ' ')"
    echo "load       $(cat /proc/loadavg)"
    echo "limit      $(cat /sys/fs/cgroup/cpu.max 2>/dev/null || echo none)"
    echo "compiler   $(${CC:-cc} --version 2>/dev/null | head -n 1 || true)"
    find_python
    echo "python     $("$python" -c 'import sys; print(sys.version.split()[0])')," \
        "torch $("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null || echo none)"
}

measure() {
    command -v "${CC:-cc}" >/dev/null 2>&1 || compiled=--compiled
    test -z "$compiled" || echo "programs   compiled before, in build/bench"
    # Compiling, starting and first rounds take their time beside that of measuring.
    seconds=$(($(left) * 6 / 10))
    BENCH_PYTHON=$python timeout -k 10 "$(left)" python3 tests/bench/run.py --only cores \
        --seconds "$seconds" $compiled
    case $? in
    124 | 137) echo "The time was up: rows are missing." ;;
    esac
    echo "processor  $(build/bench/bench_gemm 1 1 bf16 2>&1)"
    echo "seconds    $(($(date +%s) - begin))"
}

# In one shell, so that describe can set $python; what is printed is kept.
{ describe && measure; } 2>&1 | tee "$out"
echo "written: $out"
