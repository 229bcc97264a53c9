#!/usr/bin/env bash
# Makes sure that what the build needs is there: a C toolchain, Rust by rustup, Python for the client tests.
# Installs what it may (rustup for the user; system packages where root) and otherwise prints the line to run.
#   scripts/bootstrap.sh build    what `make demo` needs
#   scripts/bootstrap.sh test     also what `make test` needs, the test cluster and an emulated machine among it where there can be one
#   scripts/bootstrap.sh cluster  what `make test-cluster` needs
#   scripts/bootstrap.sh oldest   what `make test-oldest` needs
#   scripts/bootstrap.sh check    also what `make check` needs
#   scripts/bootstrap.sh gpu      what `make test-gpu` needs
#   scripts/bootstrap.sh images   what `make images` needs
# A command behind the goal runs beside the builds of the cluster's programs, which by themselves leave processors idle.
set -euo pipefail
cd "$(dirname "$0")/.."
goal=${1:-build}
shift $(($# > 0))

say() { printf 'bootstrap: %s\n' "$*" >&2; }

if [ -z "${HOME:-}" ]; then
    say "HOME is not set, and the build keeps Rust and its cache there; please set it:"
    say "    export HOME=/root    # or another directory that is yours"
    exit 1
fi
cache=${HEARTH_CACHE:-$HOME/.cache/hearth}
# Where a user's PATH lacks the system's own programs.
ldconfig=$(command -v ldconfig || echo /sbin/ldconfig)

case $goal in
build | cluster | oldest) with_python='' ;;
*) with_python=yes ;;
esac

# The line that installs packages, given by their Debian names, with this system's package manager.
install_line() {
    local package names=() manager=apt-get
    for manager in apt-get dnf zypper pacman; do
        ! command -v "$manager" >/dev/null || break
        manager=''
    done
    for package in "$@"; do
        case $manager:$package in
        dnf:build-essential | zypper:build-essential) names+=(gcc gcc-c++ make) ;;
        pacman:build-essential) names+=(base-devel) ;;
        dnf:iproute2) names+=(iproute) ;;
        dnf:conntrack | zypper:conntrack | pacman:conntrack) names+=(conntrack-tools) ;;
        dnf:libseccomp-dev | zypper:libseccomp-dev) names+=(libseccomp-devel) ;;
        pacman:libseccomp-dev) names+=(libseccomp) ;;
        dnf:pkg-config | zypper:pkg-config) names+=(pkgconf-pkg-config) ;;
        pacman:pkg-config) names+=(pkgconf) ;;
        pacman:python3) names+=(python) ;;
        # The module is part of Python itself there.
        dnf:python3-venv | zypper:python3-venv) names+=(python3-pip) ;;
        pacman:python3-venv) names+=(python-pip) ;;
        *) names+=("$package") ;;
        esac
    done
    case $manager in
    zypper) echo "sudo zypper install -y ${names[*]}" ;;
    pacman) echo "sudo pacman -S --needed --noconfirm ${names[*]}" ;;
    '') echo "(by this system's own package manager; Debian's names:) ${names[*]}" ;;
    *) echo "sudo $manager install -y ${names[*]}" ;;
    esac
}

need_packages=()
{ command -v cc && command -v c++; } >/dev/null || need_packages+=(build-essential)
command -v curl >/dev/null || need_packages+=(curl ca-certificates)
# Nodes of a test cluster need root and the cgroup v1 hierarchies; a control plane needs neither.
cluster=none
[ "$goal" != oldest ] || cluster=oldest
if [ "$goal" = test ] || [ "$goal" = cluster ]; then
    cluster=control
    if [ "$(uname -s)" != Linux ]; then
        cluster=none
    elif [ "$(id -u)" = 0 ] && [ -e /sys/fs/cgroup/memory/cgroup.procs ]; then
        cluster=nodes
        command -v ip >/dev/null || need_packages+=(iproute2)
        command -v nft >/dev/null || need_packages+=(nftables)
        command -v iptables >/dev/null || need_packages+=(iptables)
        command -v conntrack >/dev/null || need_packages+=(conntrack)
        # What runc is built with.
        [ -e /usr/include/seccomp.h ] || need_packages+=(libseccomp-dev)
        command -v pkg-config >/dev/null || need_packages+=(pkg-config)
    fi
fi
if [ -n "$with_python" ]; then
    command -v python3 >/dev/null || need_packages+=(python3)
    python3 -c 'import venv, ensurepip' 2>/dev/null || need_packages+=(python3-venv)
fi
if [ ${#need_packages[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${need_packages[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need_packages[@]}" >&2
    else
        say "these system packages are missing; please run:"
        say "    $(install_line "${need_packages[@]}")"
        exit 1
    fi
fi

export PATH="$HOME/.cargo/bin:$PATH"
# A distribution's cargo follows no rust-toolchain.toml: it is used where it is new enough.
oldest_rust=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
is_cargo_usable() {
    command -v cargo >/dev/null || return 1
    ! command -v rustup >/dev/null || return 0
    cargo_version=$(cargo --version 2>/dev/null | cut -d' ' -f2)
    [ "$(printf '%s\n' "$oldest_rust" "$cargo_version" | sort -V | head -n 1)" = "$oldest_rust" ]
}
if ! is_cargo_usable; then
    [ -z "${cargo_version:-}" ] ||
        say "$(command -v cargo) is $cargo_version, and Hearth needs Rust $oldest_rust or newer"
    say "installing Rust by rustup for $(id -un)"
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | RUSTUP_INIT_SKIP_PATH_CHECK=yes sh -s -- -y --profile minimal --default-toolchain none >&2 || {
        say "rustup could not be installed: connect to the internet, or install Rust $oldest_rust or newer yourself, and run this again"
        exit 1
    }
fi
if command -v rustup >/dev/null && ! cargo --version >/dev/null 2>&1; then
    say "installing the toolchain that rust-toolchain.toml names"
    rustup toolchain install >&2
fi

# A machine with a GPU compiles its kernels at first use: NVRTC is taken from PyPI where the system has none.
if [ "$goal" != cluster ] && [ "$goal" != oldest ] && [ ! -e "$cache/nvrtc" ] && "$ldconfig" -p 2>/dev/null | grep -q 'libcuda\.so\.1' &&
    ! "$ldconfig" -p | grep -q 'libnvrtc\.so\.12' && python3 -c 'import venv, ensurepip' 2>/dev/null; then
    say "installing NVRTC for this machine's GPU"
    python3 -m venv "$cache/nvrtc-py"
    "$cache/nvrtc-py/bin/pip" install -q --disable-pip-version-check \
        "$(grep '^nvidia-cuda-nvrtc' tests/python/requirements.txt)" >&2
    ln -s "$(echo "$cache"/nvrtc-py/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib)" "$cache/nvrtc"
fi

if [ -n "$with_python" ]; then
    # Made anew when the list changes: a package that an older list named must not hide that this one lacks it.
    stamp="$cache/py/.requirements"
    if ! cmp -s tests/python/requirements.txt "$stamp"; then
        say "installing the Python packages that the tests use"
        python3 -m venv --clear "$cache/py"
        "$cache/py/bin/pip" install -q --disable-pip-version-check -r tests/python/requirements.txt >&2
        cp tests/python/requirements.txt "$stamp"
    fi
fi

if [ "$goal" = check ] && [ ! -x "$cache/tools/bin/cargo-deny" ]; then
    say "building cargo-deny (once, a few minutes)"
    cargo install cargo-deny --version "${CARGO_DENY_VERSION:?}" --locked --quiet --root "$cache/tools" >&2
fi

if [ "$goal" = test ] && ! tests/vm/build.sh; then
    say "without the emulated machine, the tests on NUMA nodes and cgroup v2 are left out"
fi

# Without Go, tests are left out; what cannot be built with it is a fault.
build_programs() {
    local status=0
    [ "$cluster" = none ] || tests/cluster/build.sh "$cluster" || status=$?
    if [ "$status" = 3 ]; then
        say "without the test cluster's programs, the tests on Kubernetes are left out"
    elif [ "$status" != 0 ]; then
        say "the test cluster's programs cannot be built: see above"
        return 1
    fi
}
build_programs &
programs=$!
status=0
"$@" || status=$?
wait "$programs" || status=1
exit $status
