#!/usr/bin/env bash
# Boots a kernel of the distribution in an emulated machine (qemu without KVM), runs one command in it, prints what that
# prints and ends with its status; 124 where the machine did not come to its end. It has what the machine around it may lack:
# cgroup v2 alone, several NUMA nodes, any number of CPUs, a kernel older than 6.2, a root of its own.
#   run.sh [-m MIB] [-c CPUS] [-n NUMA_NODES] [-k MODULE]... [-t SECONDS] [-f PATH[=TARGET]]... [-d DIRECTORY=TARGET]... -- COMMAND...
# -f takes a file (a program without its symbols and with the libraries that it is linked to) or a directory to the same path in
# the machine, or to TARGET: into its memory. -d makes a disk of a directory, read-only at TARGET, whose pages the machine caches
# and drops as of any disk. -k loads a module of the kernel, with those that it needs. busybox is /bin.
set -euo pipefail
memory=1024 cpus=2 nodes=1 limit=300 files=() modules=() disks=()
while [ $# -gt 0 ]; do
    case $1 in
    -m) memory=$2 ;; -c) cpus=$2 ;; -n) nodes=$2 ;; -t) limit=$2 ;; -f) files+=("$2") ;; -k) modules+=("$2") ;; -d) disks+=("$2") ;;
    --) shift; break ;;
    *) sed -n '2,9p' "$0" >&2; exit 2 ;;
    esac
    shift 2
done
[ $# -gt 0 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
"$(dirname "$0")/build.sh"
cache=${HEARTH_CACHE:-$HOME/.cache/hearth}/vm

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{bin,proc,sys,dev,tmp,run,root,etc,modules}
cp "$cache/root/bin/busybox" "$root/bin/"
version=$(basename "$cache"/root/lib/modules/*)

libraries() { # of a program
    local library
    ldd "$1" 2>/dev/null | grep -oE '/[^ ]+' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"
        cp -nL "$library" "$root$library"
    done || true
}
copy() { # SOURCE TARGET
    mkdir -p "$root$(dirname "$2")"
    if [ -d "$1" ]; then
        cp -rL "$1" "$root$2"
    elif [ -x "$1" ] && strip -o "$root$2" "$1" 2>/dev/null; then
        libraries "$1"
    else
        cp -L "$1" "$root$2"
    fi
}
for file in ${files[@]+"${files[@]}"}; do
    source=$(realpath -s "${file%%=*}")
    case $file in *=*) copy "$source" "${file#*=}" ;; *) copy "$source" "$source" ;; esac
done

mounts='' drives=()
for disk in ${disks[@]+"${disks[@]}"}; do
    number=${#drives[@]} letter=abcdefgh
    letter=${letter:$((number / 2)):1}
    size=$(du -sk --apparent-size "${disk%%=*}" | cut -f1)
    mke2fs -q -t ext4 -O ^has_journal -m 0 -d "${disk%%=*}" "$work/disk-$letter" "$((size + size / 16 + 8192))k" >/dev/null
    drives+=(-drive "file=$work/disk-$letter,format=raw,if=virtio,cache=unsafe")
    mounts+="mkdir -p ${disk#*=}; mount -t ext4 -o ro /dev/vd$letter ${disk#*=}"$'\n'
done
[ ${#disks[@]} = 0 ] || modules+=(virtio_pci virtio_blk)

depends() { # files of modules in the order in which they are loaded
    local module file needs
    for module in "$@"; do
        file=$(find "$cache/root/lib/modules/$version" -name "${module//_/[-_]}.ko" | head -n 1)
        [ -n "$file" ] || { echo "run.sh: the kernel has no module $module" >&2; exit 2; }
        needs=$(modinfo -F depends "$file" | tr ',' ' ')
        # shellcheck disable=SC2086 # names are words
        [ -z "$needs" ] || depends $needs
        echo "$file"
    done
}
if [ ${#modules[@]} -gt 0 ]; then
    depends "${modules[@]}" | awk '!seen[$0]++' | {
        number=100
        while read -r file; do
            cp "$file" "$root/modules/$number-$(basename "$file")"
            number=$((number + 1))
        done
    }
fi

{
    cat <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/usr/bin:/usr/sbin:/sbin HOME=/root
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir -p /dev/shm
mount -t tmpfs none /dev/shm
mount -t cgroup2 none /sys/fs/cgroup
ip link set lo up
for module in /modules/*.ko; do [ -e "$module" ] && insmod "$module"; done
INIT
    printf '%s' "$mounts"
    echo 'echo VM-BEGIN'
    printf '('
    printf '%q ' "$@"
    printf '); status=$?; echo; echo "VM-STATUS $status"; poweroff -f\n'
} >"$root/init"
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) >"$work/initrd"

numa=()
for ((node = 0; node < nodes; node++)); do
    first=$((node * cpus / nodes)) last=$(((node + 1) * cpus / nodes - 1))
    numa+=(-object "memory-backend-ram,id=m$node,size=$((memory / nodes))M" -numa "node,nodeid=$node,cpus=$first-$last,memdev=m$node")
done
# A CPU without AVX: the emulator computes wide vectors element by element, and the scalar kernels take a fifth of the time.
timeout "$limit" qemu-system-x86_64 -accel tcg,thread=multi -cpu Nehalem -smp "$cpus,sockets=$nodes" -m "$((memory / nodes * nodes))" \
    "${numa[@]}" ${drives[@]+"${drives[@]}"} -kernel "$cache"/root/boot/vmlinuz-* -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1" \
    -nographic -no-reboot -nic none </dev/null >"$work/out" 2>&1 || true
tr -d '\r' <"$work/out" | sed -n '/VM-BEGIN/,/VM-STATUS/p' | sed '1d;/^VM-STATUS /d'
status=$(tr -d '\r' <"$work/out" | sed -n 's/^VM-STATUS //p' | tail -n 1)
[ -n "$status" ] || {
    echo "run.sh: the machine did not come to its end; its last words:" >&2
    tail -n 15 "$work/out" >&2
    exit 124
}
exit "$status"
