#!/bin/sh
# Installs tshard below $DESTDIR$PREFIX, or removes it from there.
#
#   install.sh install [tshard-run] [libtshard.so.N]     paths of what was built
#   install.sh uninstall
#
# include/tshard/ holds tshard.h and backends/, so that with -I PREFIX/include/tshard both
# #include "tshard.h" and #include "backends/tshard_threads.h" work as in the source tree. Beside
# them is tshard.c, the implementation as a file to compile.

set -eu
action=$1
shift
case $PREFIX in
/*) root=${DESTDIR:-}${PREFIX%/} ;;
*) echo "install: PREFIX=$PREFIX is not an absolute path" >&2; exit 1 ;;
esac
here=$(dirname "$0")
top=$here/../..

# put FILE PLACE MODE: copies FILE to PLACE below the prefix; to uninstall, removes PLACE.
put() {
    if [ "$action" = install ]; then
        mkdir -p "$(dirname "$root/$2")"
        install -m "$3" "$1" "$root/$2"
    else
        rm -f "$root/$2"
    fi
}

macro() { sed -n "s/^#define TSHARD_VERSION_$1 //p" "$top/tshard.h"; }
minor=$(macro MAJOR).$(macro MINOR)
version=$minor.$(macro PATCH)

put "$top/tshard.h" include/tshard/tshard.h 644
for header in "$top"/backends/*.h; do
    put "$header" "include/tshard/backends/${header##*/}" 644
done
implementation=$(mktemp)
trap 'rm -f "$implementation"' EXIT
sed 's|"\.\./|"backends/|' "$here/library.c" >"$implementation"
put "$implementation" include/tshard/tshard.c 644
put "$top/LICENSE" share/doc/tshard/LICENSE 644
for file in tshardConfig.cmake tshardConfigVersion.cmake; do
    put "$here/$file" "lib/cmake/tshard/$file" 644
done
put "$here/tshard.pc.in" lib/pkgconfig/tshard.pc 644

# gdb loads it together with the library of this path; see examples/DEBUGGING.md
gdb=share/gdb/auto-load${PREFIX%/}/lib/libtshard.so.$minor-gdb.py

if [ "$action" = uninstall ]; then
    put - "$gdb" -
    rmdir -p "$root/${gdb%/*}" 2>/dev/null || true
    put - bin/tshard-run -
    put - "lib/libtshard.so.$minor" -
    put - lib/libtshard.so -
    for folder in include/tshard/backends include/tshard share/doc/tshard lib/cmake/tshard; do
        rmdir "$root/$folder" 2>/dev/null || true
    done
    echo "removed tshard $version from $root"
    exit 0
fi

prefix=${PREFIX%/}
sed -e "s|@PREFIX@|$prefix|" -e "s|@LIBDIR@|$prefix/lib|" -e "s|@INCLUDEDIR@|$prefix/include|" \
    -e "s|@VERSION@|$version|" "$here/tshard.pc.in" >"$root/lib/pkgconfig/tshard.pc"
launcher=
for built; do
    case $built in
    *tshard-run) put "$built" bin/tshard-run 755; launcher=yes ;;
    *.so.*)
        put "$built" "lib/${built##*/}" 755
        put "$here/tshard-gdb.py" "$gdb" 644
        ln -sf "${built##*/}" "$root/lib/libtshard.so"
        echo "$prefix/lib/libtshard.so: if the loader does not find it, run ldconfig" ;;
    esac
done
[ "$launcher" ] || echo "tshard-run is not installed: it needs libuv1-dev and libsodium-dev"
echo "installed tshard $version in $root"
