#!/usr/bin/env bash
# The first process of a node: it sets the node's own view of the machine up and then waits, reaping orphans, until it is
# killed, and the whole node with it.
#   node.sh NAME STATE GROUP    in mount, UTS, network and PID namespaces of its own
# Everything mounted here is seen by this node alone and gone with it.
set -euo pipefail
name=$1 state=$2 group=$3

mount --make-rshared /
hostname "$name"
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/log
# Where the kubelet, device plugins and host paths of Pods lie: each node has its own.
mount --bind "$state/var-lib" /var/lib
mount --make-rshared /var/lib
mkdir -p /var/lib/kubelet

# The kubelet sets these for the machine unless they have the values that it wants: so it sees files that have them.
while read -r file value; do
    [ -e "/proc/sys/$file" ] || continue
    seen=/run/sys-${file//\//-}
    echo "$value" >"$seen"
    mount --bind "$seen" "/proc/sys/$file"
done <<'END'
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END

for procs in /sys/fs/cgroup{,/*}"$group"/sys/cgroup.procs; do
    [ ! -e "$procs" ] || echo 1 >"$procs"
done
touch "$state/ready"
trap 'exit 0' TERM
while :; do
    sleep 3600 &
    wait $!
done
