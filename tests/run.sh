#!/bin/sh
# Runs test programs one after the other, each under a time limit, and counts.
#
#     run.sh [--limit SECONDS] [--slow FACTOR] [--with COMMAND] PROGRAM...
#
# Needs only a POSIX shell, awk and coreutils, so that it also works where Python is missing: then
# the scripts among the programs are skipped.
#
# Programs report in cmocka's words. An example (a program in a folder "examples") passes if it
# prints something and exits with 0. A program that is missing, dies, does not end in time or runs no
# test counts as one failure. A test that is skipped prints a line "skip: ..." with the reason. A
# script may have a line "SCRIPT_LIMIT = SECONDS" of its own. --slow multiplies every limit, for
# sanitizers; --with puts a command, an emulator, before every program that is no script. The last
# line is "N passed, N failed, N skipped"; the exit code is 1 if any failed or none passed. What a
# program printed is kept beside it, in PROGRAM.log.

limit=120
slow=1
with=
while :; do
    case $1 in
    --limit) limit=$2; shift 2 ;;
    --slow) slow=$2; shift 2 ;;
    --with) with=$2; shift 2 ;;
    *) break ;;
    esac
done
PYTHON=${PYTHON:-python3}
passed=0 failed=0 skipped=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

# The thread sanitizer does not start where the kernel places memory too randomly.
prefix=
if [ "$slow" != 1 ] && setarch -R true 2>/dev/null; then prefix="setarch -R"; fi

# "passed failed skipped" of the log, by cmocka's closing lines.
counts() {
    awk 'function number() { match($0, /[0-9]+ test\(s\)/); return substr($0, RSTART) + 0 }
         /\[  PASSED  \] .*test\(s\)/         { passed += number() }
         /\[  FAILED  \] .*test\(s\), listed/ { failed += number() }
         /\[  SKIPPED \] .*test\(s\), listed/ { skipped += number() }
         END { printf "%d %d %d\n", passed, failed, skipped }' "$log"
}

# The log's last lines without cmocka's own, or of a success the reasons for what was skipped.
excerpt() {
    noise='^\[(=+| RUN      |       OK |  PASSED  )\]|^[[:space:]]*$'
    if [ "$1" -gt 0 ]; then
        grep -avE "$noise" "$log" | tail -n 60
    elif [ "$2" -gt 0 ]; then
        grep -ai '^skip' "$log"
    fi | sed 's/^/      | /'
}

# Runs "$@", the program, for so many seconds, into the log; why it failed, where only its end tells.
run() {
    seconds=$1 example=$2
    shift 2
    timeout -s KILL "$seconds" $prefix "$@" </dev/null >"$log" 2>&1
    code=$?
    if [ "$example" = 1 ] && ! grep -q "^\[  SKIPPED \]" "$log"; then
        set -- "$([ $code = 0 ] && grep -c . "$log" | sed 's/^[1-9].*/1/')" 0 0
    else
        set -- $(counts)
    fi
    p=${1:-0} f=$2 s=$3 why=
    if [ $code = 137 ]; then
        why="no end within $seconds s"
    elif [ $code -gt 128 ]; then
        why="died of signal $((code - 128))"
    elif [ $code != 0 ] && [ "$f" = 0 ]; then
        why="exit code $code"
    elif [ $((p + f + s)) = 0 ]; then
        why="ran no test"
        [ "$example" = 0 ] || why="printed nothing"
    fi
    [ -z "$why" ] || f=$((f + 1))
}

for program; do
    begin=$(date +%s%N)
    example=0 seconds=$limit
    case $program in */examples/*) example=1 seconds=60 ;; esac
    name=$(echo "$program" | sed -E 's,^(.*/)?tests/,,; s,^(.*/)?examples/,examples/,')
    p=0 f=0 s=0 why=
    : >"$log"
    if [ ! -e "$program" ]; then
        f=1 why="was not built"
    else
        case $program in
        *.py)
            own=$(sed -n 's/^SCRIPT_LIMIT = \([0-9]*\).*/\1/p' "$program")
            seconds=$(echo "${own:-$limit} $slow" | awk '{ print $1 * $2 }')
            if command -v "$PYTHON" >/dev/null; then
                run "$seconds" 0 "$PYTHON" -B "$program"
            else
                s=1
                echo "skip: needs python3" >"$log"
            fi
            ;;
        *)
            case $program in /*) path=$program ;; *) path=./$program ;; esac
            run "$(echo "$seconds $slow" | awk '{ print $1 * $2 }')" $example $with "$path"
            ;;
        esac
    fi
    case $program in *.py) ;; *) [ ! -e "$program" ] || cp "$log" "$program.log" ;; esac
    echo "$name $p $f $s $begin $(date +%s%N) $why" | awk '{
        split("passed failed skipped", kind)
        for (i = 1; i <= 3; i++)
            if ($(i + 1)) words = words (words ? ", " : "") $(i + 1) " " kind[i]
        why = $7
        for (i = 8; i <= NF; i++) why = why " " $i
        printf "%-6s%-36s %6.1f s  %s\n", $3 ? "FAIL" : "ok", $1, ($6 - $5) / 1e9,
            words (why ? ": " why : "")
    }'
    excerpt "$f" "$s"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed != 0 ]
