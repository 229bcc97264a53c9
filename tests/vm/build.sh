#!/usr/bin/env bash
# Makes sure that tests/vm/run.sh can start: qemu, and a kernel of the distribution with a busybox, kept in $HEARTH_CACHE/vm.
# What is there is left alone. Ends with 1 and the reason where it cannot be had.
set -euo pipefail
cache=${HEARTH_CACHE:-$HOME/.cache/hearth}/vm

fail() { printf 'vm: %s\n' "$*" >&2; exit 1; }

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the emulated machine is of x86_64 Linux"

packages=()
command -v qemu-system-x86_64 >/dev/null || packages+=(qemu-system-x86)
command -v cpio >/dev/null || packages+=(cpio)
command -v modinfo >/dev/null || packages+=(kmod)
command -v strip >/dev/null || packages+=(binutils)
if [ ${#packages[@]} -gt 0 ]; then
    { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; } ||
        fail "these system packages are missing: sudo apt-get install -y ${packages[*]}"
    printf 'vm: installing %s\n' "${packages[*]}" >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2 ||
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2; }
fi
[ -e "$cache/ready" ] && exit 0
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
[ -e "$cache/ready" ] && exit 0
command -v apt-get >/dev/null || fail "the kernel is taken from Debian, and there is no apt-get"

work=$(mktemp -d "$cache/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
printf 'vm: fetching a kernel of the distribution (30 MB), once\n' >&2
kernel=$(apt-cache depends linux-image-cloud-amd64 2>/dev/null | awk '/Depends: linux-image/ {print $2; exit}')
[ -n "$kernel" ] || fail "this distribution has no package linux-image-cloud-amd64"
(cd "$work" && apt-get download -qq "$kernel" busybox-static 2>/dev/null) || fail "$kernel and busybox-static cannot be fetched"
mkdir "$work/root"
for package in "$work"/*.deb; do dpkg-deb -x "$package" "$work/root"; done
rm -rf "$cache/root"
mv "$work/root" "$cache/root"
touch "$cache/ready"
