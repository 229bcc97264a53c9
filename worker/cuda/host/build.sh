#!/bin/sh
# Builds libcuda.so.1, libnvrtc.so.12 and libnvidia-ml.so.1 of the host model in OUT_DIR. Prints nothing when all is well.
# Usage: build.sh OUT_DIR
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
mkdir -p "$out"
flags="-std=c++17 -O3 -g1 -fPIC -fvisibility=hidden -fno-strict-aliasing -ffp-contract=off -Wall -Wextra -Werror -I$here/include"

driver="access async_copy atomic collectives config device diagnosis driver_device driver_graph driver_memory driver_module driver_stream
    elements executor fault fiber launch memory module race_clock races shadow shared_memory stream stream_order stream_races transfer warpgroup"
compiler="compile config embedded_headers entry_points files nvrtc options"

objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
compile() {
    for name in $1; do
        [ -e "$objects/$name.o" ] || echo "$name"
    done | xargs -P "$(nproc)" -I NAME g++ $flags -c "$here/src/NAME.cpp" -o "$objects/NAME.o"
}
link() {
    set -- "$out/$1" "$1" $(for name in $2; do echo "$objects/$name.o"; done)
    library=$1 soname=$2
    shift 2
    # Renamed into place, because a process may have the old one mapped.
    g++ -shared -Wl,-soname,"$soname" -Wl,--no-undefined "$@" -ldl -lpthread -o "$library.new"
    mv "$library.new" "$library"
}

compile "$driver"
link libcuda.so.1 "$driver"
(cd "$here/include" && compile "$compiler")
link libnvrtc.so.12 "$compiler"
management="config nvml"
compile "$management"
link libnvidia-ml.so.1 "$management"
