#!/usr/bin/env bash
# Builds the programs of the test cluster through the Go module client, each once:
#   tests/cluster/build.sh control    API server, controllers, etcd, kubectl: a control plane without nodes
#   tests/cluster/build.sh            these and what nodes need: kubelet, containerd, runc, CNI, DNS, metrics, helm
#   tests/cluster/build.sh directories    where they are, one directory a line
# A component lies in $HEARTH_CACHE/kube/NAME-VERSION. What is there is not built again, so a build that was cut off goes on
# where it stopped, and two at once wait for each other.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
cache=${HEARTH_CACHE:-$HOME/.cache/hearth}/kube
goal=${1:-nodes}

declare -A version
while IFS='=' read -r name value; do
    [[ $name == \#* || -z $name ]] || version[$name]=$value
done <"$here/versions"

say() { printf 'cluster: %s\n' "$*" >&2; }

# The directory of a component. Our own programs are known by a hash of their source.
place() {
    case $1 in
    fake-gpu) echo "$cache/$1-$(cat "$here"/fake-gpu/* | sha256sum | cut -c1-12)" ;;
    pause) echo "$cache/$1-$(sha256sum <"$here/pause.c" | cut -c1-12)" ;;
    *) echo "$cache/$1-${version[$1]}" ;;
    esac
}

# lacks COMPONENT PROGRAM...: whether one of its programs is missing; says so, and ends where it could not be built.
lacks() {
    local component=$1 program
    shift
    for program; do
        [ -x "$(place "$component")/$program" ] && continue
        if [ "$component" != pause ] && ! command -v go >/dev/null; then
            say "$program is not built, and there is no Go to build it with: see https://go.dev/dl"
            exit 1
        fi
        say "building $(basename "$(place "$component")"), once"
        return 0
    done
    return 1
}

# keep COMPONENT: moves what was built in $work/out into place, each program at once.
keep() {
    mkdir -p "$(place "$1")"
    mv "$work"/out/* "$(place "$1")/"
}

# install COMPONENT PACKAGE...: what `go install` can build by itself.
install() {
    local component=$1
    shift
    (cd "$work" && GOBIN=$work/out go install "${flags[@]}" "${@/%/@v${version[$component]}}")
    keep "$component"
}

kubernetes() {
    local programs=("$@") v=${version[kubernetes]} published
    mkdir -p "$work/kubernetes"
    cd "$work/kubernetes"
    # Its go.mod names its staging modules as v0.0.0: each is replaced by its published twin.
    published=$(go mod download -json "k8s.io/kubernetes@v$v" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
    {
        printf 'module hearth/kubernetes\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes v%s\n\n' "$v"
        awk -v twin="v0.${v#1.}" '$2 == "v0.0.0" && $1 ~ /^k8s.io\// {print "replace " $1 " => " $1 " " twin}' "$published"
        printf 'tool k8s.io/kubernetes/cmd/%s\n' "${programs[@]}"
    } >go.mod
    go mod tidy
    local program
    for program in "${programs[@]}"; do
        [ -x "$(place kubernetes)/$program" ] && continue
        go build -o "$work/out/" -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$v" "k8s.io/kubernetes/cmd/$program"
        keep kubernetes
    done
}

etcd() {
    # Its go.mod has replace lines, which `go install` refuses: so a module of ours requires it.
    mkdir -p "$work/etcd"
    cd "$work/etcd"
    printf 'module hearth/etcd\n\ngo 1.26.0\n\nrequire go.etcd.io/etcd/server/v3 v%s\n\ntool go.etcd.io/etcd/server/v3\n' \
        "${version[etcd]}" >go.mod
    go mod tidy
    go build "${flags[@]}" -o "$work/out/etcd" go.etcd.io/etcd/server/v3
    keep etcd
}

control() {
    local programs=(kube-apiserver kube-controller-manager kubectl)
    ! lacks kubernetes "${programs[@]}" || kubernetes "${programs[@]}"
    ! lacks etcd etcd || etcd
}

nodes() {
    local programs=(kube-scheduler kubelet kube-proxy)
    ! lacks kubernetes "${programs[@]}" || kubernetes "${programs[@]}"
    ! lacks containerd containerd containerd-shim-runc-v2 ctr ||
        install containerd github.com/containerd/containerd/v2/cmd/{containerd,containerd-shim-runc-v2,ctr}
    # Without the seccomp tag a Pod with seccompProfile RuntimeDefault cannot start.
    ! lacks runc runc ||
        (flags=(-tags "seccomp netgo osusergo" -ldflags "-s -w -linkmode external -extldflags -static") &&
            CGO_ENABLED=1 install runc github.com/opencontainers/runc)
    ! lacks cni bridge loopback host-local portmap ||
        install cni github.com/containernetworking/plugins/plugins/{main/bridge,main/loopback,ipam/host-local,meta/portmap}
    ! lacks helm helm || install helm helm.sh/helm/v4/cmd/helm
    ! lacks coredns coredns || install coredns github.com/coredns/coredns
    ! lacks metrics-server metrics-server || install metrics-server sigs.k8s.io/metrics-server/cmd/metrics-server
    ! lacks fake-gpu fake-gpu ||
        { (cd "$here/fake-gpu" && go build "${flags[@]}" -o "$work/out/fake-gpu" .) && keep fake-gpu; }
    ! lacks pause pause ||
        { cc -O2 -static -s -o "$work/out/pause" "$here/pause.c" && keep pause; }
}

if [ "$goal" = directories ]; then
    for name in "${!version[@]}" fake-gpu pause; do place "$name"; done
    exit
fi

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
work=$(mktemp -d "$cache/.build.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/out"
flags=(-ldflags "-s -w")
export GOFLAGS=-buildvcs=false CGO_ENABLED=0
case $goal in
control) control ;;
nodes)
    control
    nodes
    ;;
*)
    say "'$goal' is no goal: control, nodes or directories"
    exit 2
    ;;
esac
