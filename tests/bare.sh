#!/bin/sh
# The README's two commands, `make run` and then `make test`, on a bare Debian 12 that has gcc and
# make and nothing else: as a user who may not install packages, and as root.
#
#     bare.sh [REVISION]    tests that commit of this repository (default: HEAD)
#
# The variable only, if it is set, chooses the tests, as it does for make test.
#
# The system is made by debootstrap in build/bare; package sources and proxies are those of this
# machine. Needs root and debootstrap, which it installs where it may. Logs stand in build/bare. The
# last line is "N passed, N failed, N skipped"; the exit code is 1 if any failed.

cd "$(dirname "$0")/.." || exit 1
revision=${1:-HEAD}
bare=$PWD/build/bare
root=$bare/root
passed=0 failed=0

skip() {
    echo "skip: test-bare: $1"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
}

[ "$(id -u)" = 0 ] || skip "needs root, for debootstrap and chroot"
command -v debootstrap >/dev/null || apt-get install -y --no-install-recommends debootstrap \
    >/dev/null 2>&1 || skip "needs debootstrap"
unshare --mount --pid --fork true 2>/dev/null || skip "needs mount and pid namespaces"
mkdir -p "$bare"

# ---- the system --------------------------------------------------------------

# The first of this machine's package sources that has Debian 12, or the usual one. netbase (the
# names of protocols) is in every Debian that was not made by hand.
source=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(SITE)' 2>/dev/null |
    awk '$1 == "bookworm" && $2 == "main" { print $3; exit }')
settings="$(apt-config dump 2>/dev/null | grep -iE '^Acquire::([a-z]+::)?(proxy|check-)')"
if [ ! -s "$bare/system.tar" ]; then
    rm -rf "$root"
    debootstrap --variant=minbase --include=gcc,make,libc6-dev,netbase bookworm "$root" $source \
        >"$bare/debootstrap.log" 2>&1 || {
        tail -n 3 "$bare/debootstrap.log"
        skip "debootstrap cannot get Debian 12 here (build/bare/debootstrap.log)"
    }
    tar -C "$root" -cf "$bare/system.tar.new" . && mv "$bare/system.tar.new" "$bare/system.tar"
fi
rm -rf "$root"
mkdir -p "$root"
tar -C "$root" -xf "$bare/system.tar"
echo "$settings" >"$root/etc/apt/apt.conf.d/99machine"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
for home in root home/user; do
    mkdir -p "$root/$home"
    git clone -q . "$root/$home/tshard" && git -C "$root/$home/tshard" checkout -q "$revision" ||
        exit 1
done
chown -R 1000:1000 "$root/home/user"

# ---- the commands ------------------------------------------------------------

# inside USER COMMAND...: runs it there, in the clone of USER, with nothing of this environment but
# the proxies. All that it started ends with it. The root is a mount point, as on a real machine:
# tests that make network namespaces need that.
inside() {
    who=$1
    shift
    case $who in
    root) home=/root become= ;;
    *) home=/home/user become="setpriv --reuid 1000 --regid 1000 --clear-groups" ;;
    esac
    proxies=$(env | grep -iE '^(https?|no)_proxy=')
    timeout -s KILL 1800 unshare --mount --pid --ipc --fork --kill-child sh -c '
        root=$1 home=$2
        shift 2
        mount --make-rprivate / && mount --bind "$root" "$root" && mount -t proc proc "$root/proc" &&
            mount -t sysfs sys "$root/sys" && mount --rbind /dev "$root/dev" || exit 1
        cd "$root$home/tshard" && exec chroot "$root" sh -c "cd $home/tshard && exec \"\$@\"" sh "$@"
    ' sh "$root" "$home" env -i HOME="$home" PATH=/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin \
        $proxies $become "$@"
}

# try USER COMMAND...: its output, each line after the seconds since the start, goes into a log.
try() {
    log=$bare/$1-$3.log
    begin=$(date +%s)
    { inside "$@" 2>&1 </dev/null; echo "exit code $?"; } |
        while IFS= read -r line; do
            printf '%4d  %s\n' "$(($(date +%s) - begin))" "$line"
        done >"$log"
    last=$(sed -n 'x;$p' "$log" | cut -c7-)
    seconds=$(($(date +%s) - begin))
}

# expect WHAT CONDITION...: one check.
expect() {
    what=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL  $what"
        tail -n 12 "$log" | sed 's/^/      | /'
    fi
}

for user in user root; do
    try $user make run
    echo "$user: make run, $seconds s: $last"
    case $last in "final: "*) final=0 ;; *) final=1 ;; esac
    expect "$user: make run trains, and exits with 0" \
        sh -c '[ $1 = 0 ] && tail -n 1 "$2" | grep -q "exit code 0"' sh $final "$log"
    least=500
    if [ "$only" ]; then
        least=50
        try $user make test "only=$only"
    else
        try $user make test
    fi
    echo "$user: make test, $seconds s: $last"
    case $last in *" passed, 0 failed, "*) count=${last%% *} ;; *) count=0 ;; esac
    expect "$user: make test passes at least $least tests and fails none" [ "$count" -ge $least ]
    if [ $user = user ]; then
        expect "$user: the line that installs what is missing comes within 10 s" \
            awk '/apt-get install .*libcmocka-dev/ && $1 <= 10 { said = 1 } END { exit !said }' "$log"
        expect "$user: what cannot run is skipped, with a reason" grep -q 'skip: needs' "$log"
    else
        expect "$user: two hosts train over TCP, in network namespaces" \
            grep -q 'ok *fault/test_hosts.py .* passed' "$log"
        expect "$user: nothing is skipped for a missing package" \
            sh -c '! grep -q "skip: needs" "$1"' sh "$log"
    fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
