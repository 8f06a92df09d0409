#!/bin/sh
# Runs test programs, each under a time limit, and counts.
#
#     run.sh [--jobs N] [--limit SECONDS] [--slow FACTOR] [--with COMMAND] PROGRAM...
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
#
# --jobs programs run at a time (1). Examples, of which one may read what another wrote, and programs
# whose source has a line "run: alone" in a comment, as they measure time or need every core, run
# afterwards, one by one.

limit=120
slow=1
with=
jobs=1
while :; do
    case $1 in
    --jobs) jobs=$2; shift 2 ;;
    --limit) limit=$2; shift 2 ;;
    --slow) slow=$2; shift 2 ;;
    --with) with=$2; shift 2 ;;
    *) break ;;
    esac
done
PYTHON=${PYTHON:-python3}
folder=$(mktemp -d) || exit 1 # counts and reports of the programs, by their number
trap 'rm -rf "$folder"' EXIT

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

# The name of a program or script: its path below tests/, or examples/ and so on.
name_of() {
    echo "$1" | sed -E 's,^(.*/)?tests/,,; s,^(.*/)?examples/,examples/,'
}

# Runs a program; its report goes to standard output, its counts into $folder/$2.counts.
report() {
    program=$1
    log=$folder/$2.log
    begin=$(date +%s%N)
    example=0 seconds=$limit
    case $program in */examples/*) example=1 seconds=60 ;; esac
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
    echo "$(name_of "$program") $p $f $s $begin $(date +%s%N) $why" | awk '{
        split("passed failed skipped", kind)
        for (i = 1; i <= 3; i++)
            if ($(i + 1)) words = words (words ? ", " : "") $(i + 1) " " kind[i]
        why = $7
        for (i = 8; i <= NF; i++) why = why " " $i
        printf "%-6s%-36s %6.1f s  %s\n", $3 ? "FAIL" : "ok", $1, ($6 - $5) / 1e9,
            words (why ? ": " why : "")
    }'
    excerpt "$f" "$s"
    echo "$p $f $s" >"$folder/$2.counts"
}

# Whether the program runs after the others, with the machine for itself.
alone() {
    case $1 in
    */examples/*) return 0 ;;
    *.py) source=$1 ;;
    *) source=tests/$(name_of "$1" | sed -E 's/(_double|_nosimd)?$/.c/') ;;
    esac
    [ -f "$source" ] && grep -q 'run: alone' "$source"
}

# Runs the programs that no other worker has taken: who makes a program's folder has it. Of $1,
# those that are to run alone or with others.
work() {
    kind=$1 number=0
    shift
    for program; do
        number=$((number + 1))
        [ -e "$folder/$number.$kind" ] && mkdir "$folder/$number" 2>/dev/null || continue
        report "$program" $number >"$folder/$number.report"
        cat "$folder/$number.report"
    done
}

number=0
for program; do
    number=$((number + 1))
    if alone "$program"; then : >"$folder/$number.alone"; else : >"$folder/$number.shared"; fi
done
worker=1
while [ $worker -lt "$jobs" ]; do
    work shared "$@" &
    worker=$((worker + 1))
done
work shared "$@"
wait
work alone "$@"
cat "$folder"/*.counts 2>/dev/null | awk -v programs=$# '{ p += $1; f += $2; s += $3 }
    END {
        f += programs - NR # of which there is no report
        printf "%d passed, %d failed, %d skipped\n", p, f, s
        exit f > 0 || p == 0
    }'
