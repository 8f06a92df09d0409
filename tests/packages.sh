#!/bin/sh
# Installs Debian packages that are missing, where apt-get and the right to use it are there. Else
# prints the command that installs them; what needs them is then skipped.
#
#     packages.sh deps|deps-fuzz|deps-cross|deps-windows|deps-bench

case $1 in
deps)
    set -- build-essential clang libcmocka-dev libuv1-dev libsodium-dev libblis-pthread-dev \
        python3 iproute2 libopenmpi-dev openmpi-bin libmpich-dev mpich cmake pkg-config meson \
        libcjson-dev libpcre2-dev gdb python3-cffi python3-numpy
    ;;
deps-fuzz) set -- libclang-rt-dev ;;
deps-cross)
    set -- gcc libc6-dev python3 musl-tools qemu-user \
        gcc-i686-linux-gnu gcc-arm-linux-gnueabihf gcc-aarch64-linux-gnu gcc-riscv64-linux-gnu \
        gcc-s390x-linux-gnu gcc-powerpc64le-linux-gnu libc6-dev-i386-cross libc6-dev-armhf-cross \
        libc6-dev-arm64-cross libc6-dev-riscv64-cross libc6-dev-s390x-cross libc6-dev-ppc64el-cross
    ;;
deps-windows) set -- gcc-mingw-w64-x86-64 g++-mingw-w64-x86-64 wine wine64 ;;
deps-bench)
    set -- libblis-pthread-dev libblis4-openmp libopenblas0-pthread libopenmpi-dev openmpi-bin \
        libgloo-dev libuv1-dev libsodium-dev g++ python3 python3-venv
    ;;
*)
    echo "packages.sh: no list is called \"$1\"" >&2
    exit 2
    ;;
esac
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
