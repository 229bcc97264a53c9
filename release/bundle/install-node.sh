#!/usr/bin/env bash
# Puts Hearth's images and models on this node, from this directory alone. Needs root; may be repeated.
#   sudo ./install-node.sh [OPTION]...
#     --store DIR        agent.directory of the chart (default: /var/lib/hearth)
#     --ctr COMMAND      how containerd's ctr is called, such as "k3s ctr" (default: the first that is found)
#     --no-images        models only
#     --no-models        images only
set -euo pipefail
cd "$(dirname "$0")"

# Where k3s is, and sudo may not look.
PATH=$PATH:/usr/local/bin

# User of the agents and workers.
user=65532

say() { printf 'install-node: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

store=/var/lib/hearth ctr='' images=yes models=yes
while [ $# -gt 0 ]; do
    case $1 in
    --store | --ctr) declare "${1#--}=${2:?$1 needs a value}" && shift ;;
    --no-images) images='' ;;
    --no-models) models='' ;;
    *)
        say "'$1' is none of its options; see the first lines of $0"
        exit 2
        ;;
    esac
    shift
done
[ "$(id -u)" = 0 ] || fail "it writes to $store and talks to containerd: run it with sudo"

say "comparing checksums"
sha256sum --quiet --check SHA256SUMS || fail "these files are damaged: copy the bundle again"

find_ctr() {
    local address
    if command -v k3s >/dev/null; then
        ctr='k3s ctr'
    elif [ -x /var/lib/rancher/rke2/bin/ctr ]; then
        address=/run/k3s/containerd/containerd.sock
        ctr="/var/lib/rancher/rke2/bin/ctr --address $address"
    elif command -v microk8s >/dev/null; then
        ctr='microk8s ctr'
    elif command -v ctr >/dev/null; then
        ctr=ctr
    else
        fail "no containerd was found: name its client with --ctr, or leave images out with --no-images"
    fi
}

import_images() {
    local archive name words
    [ -n "$ctr" ] || find_ctr
    read -ra words <<<"$ctr"
    while read -r archive name; do
        say "importing $name"
        # Without --local, containerd 2 unpacks by itself, which not every node is set up for; older ones know no --local.
        "${words[@]}" --namespace k8s.io images import --local "$archive" &>/dev/null ||
            "${words[@]}" --namespace k8s.io images import "$archive" >/dev/null ||
            fail "$archive was not imported: see above"
        # No registry has it: a kubelet that is short of disk must not remove it.
        "${words[@]}" --namespace k8s.io images label "$name" io.cri-containerd.pinned=pinned >/dev/null
    done <images.txt
}

# pin KEY: no server has the model, so nothing may remove it to make room. The file is made anew: the agents' user, who may write
# here, could have put a link in its place.
pin() {
    install -T -o "$user" -g "$user" -m 644 /dev/null "$store/models/.pinned-$1"
}

# A model is in its place when it is complete: it is copied beside the store's directories, and moved.
install_models() {
    local key about work
    if [ ! -d store/models ]; then
        say "there are no models in this bundle"
        return
    fi
    if [ ! -d "$store/models" ]; then
        mkdir -p "$store/models"
        chown "$user:$user" "$store" "$store/models"
    fi
    work=$(mktemp -d "$store/.bundle-XXXXXX")
    # shellcheck disable=SC2064 # the directory of now
    trap "rm -rf '$work'" EXIT
    for about in store/models/.about-*; do
        key=${about##*/.about-}
        if [ -d "$store/models/$key" ]; then
            say "model $key is there already"
        else
            say "copying model $key: $(cut -d '"' -f 4 "$about")"
            cp -R "store/models/$key" "store/models/.about-$key" "$work/"
            chmod -R u=rwX,go=rX "$work/$key"
            chown -R "$user:$user" "$work/$key" "$work/.about-$key"
            sync
            pin "$key"
            mv -T "$work/.about-$key" "$store/models/.about-$key"
            mv -T "$work/$key" "$store/models/$key"
        fi
        pin "$key"
    done
}

[ -z "$images" ] || import_images
[ -z "$models" ] || install_models
say "done"
