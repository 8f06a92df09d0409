#!/bin/sh
# Is this tree ready to become a release? Prints what is not, or the command that tags it.

set -u
cd "$(dirname "$0")/../.." || exit 1
bad=0
not() {
    echo "not ready: $*"
    bad=1
}

version=$(sed -n 's/^#define TSHARD_VERSION_[A-Z]* \([0-9]*\)$/\1/p' tshard.h | paste -sd .)
for place in "tshard.h:Version $version\\." "meson.build:version: '$version'" \
    "backends/package/vcpkg/vcpkg.json:\"version\": \"$version\"" \
    "README.md:Version $version:"; do
    grep -q "${place#*:}" "${place%%:*}" || not "${place%%:*} does not say $version"
done
first=$(grep -m 1 '^## \[' CHANGELOG.md)
case $first in
"## [$version] - "20[0-9][0-9]-[01][0-9]-[0-3][0-9]) ;;
*) not "CHANGELOG.md begins with \"$first\", not with \"## [$version] - \" and a date" ;;
esac
if git rev-parse -q --verify "refs/tags/v$version" >/dev/null; then not "the tag v$version exists"; fi
[ -z "$(git status --porcelain)" ] || not "the tree has changes that are not committed"
[ $bad = 0 ] || exit 1
echo "git tag -a v$version -m 'tshard $version'"
