#!/bin/sh
# Installs Debian packages that are missing, where apt-get and the right to use it are there. Else
# prints the command that installs them; what needs them is then skipped.
#
#     packages.sh PACKAGE...

command -v dpkg-query >/dev/null && command -v apt-get >/dev/null || exit 0
missing=
for package; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed ||
        missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ]; then
    sudo=
elif sudo -n true 2>/dev/null; then
    sudo="sudo -n"
else
    echo "missing packages; tests that need them are skipped. To install them, as root:"
    echo "    apt-get install --no-install-recommends$missing"
    exit 0
fi
echo "installing$missing"
mkdir -p build
get="$sudo env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::http::Timeout=20"
{ $get update && $get install -y --no-install-recommends $missing; } >build/deps.log 2>&1 || {
    echo "not installed:$missing; the end of build/deps.log:"
    tail -n 5 build/deps.log
}
