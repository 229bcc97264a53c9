#!/usr/bin/env bash
# Builds the programs of the test cluster through the Go module client, each once:
#   tests/cluster/build.sh control    API server, controllers, etcd, kubectl, helm: a control plane without nodes
#   tests/cluster/build.sh            these and what nodes need: kubelet, containerd, runc, CNI, DNS, metrics
#   tests/cluster/build.sh oldest     the oldest API server that the chart allows, etcd, kubectl and helm
#   tests/cluster/build.sh directories [oldest]    where they are, one directory a line; the oldest API server's first where it is asked for
# A component lies in $HEARTH_CACHE/kube/NAME-VERSION. What is there is not built again, so a build that was cut off goes on
# where it stopped, and two at once wait for each other. It says what it builds and how far it is.
# Ends with 3 where there is no Go.
set -euo pipefail
no_go=3
here=$(dirname "$(realpath "$0")")
cache=${HEARTH_CACHE:-$HOME/.cache/hearth}/kube
goal=${1:-nodes}

declare -A version
while IFS='=' read -r name value; do
    [[ $name == \#* || -z $name ]] || version[$name]=$value
done <"$here/versions"

# What each goal needs, as COMPONENT:PROGRAM,PROGRAM...; programs of one component are compiled together.
control_plane=(kubernetes:kube-apiserver,kube-controller-manager,kubectl etcd:etcd)
case $goal in
control) components=("${control_plane[@]}" helm:helm) ;;
oldest) components=(oldest:kube-apiserver etcd:etcd kubernetes:kubectl helm:helm) ;;
nodes)
    components=(
        kubernetes:kube-apiserver,kube-controller-manager,kubectl,kube-scheduler,kubelet,kube-proxy etcd:etcd
        containerd:containerd,containerd-shim-runc-v2,ctr runc:runc cni:bridge,loopback,host-local,portmap
        helm:helm coredns:coredns metrics-server:metrics-server fake-gpu:fake-gpu pause:pause
    )
    ;;
directories) ;;
*)
    echo "cluster: '$goal' is no goal: control, nodes, oldest or directories" >&2
    exit 2
    ;;
esac

say() { printf 'cluster: %s\n' "$*" >&2; }

# The directory of a component. Our own programs are known by a hash of their source.
place() {
    case $1 in
    fake-gpu) echo "$cache/$1-$(cat "$here"/fake-gpu/* | sha256sum | cut -c1-12)" ;;
    pause) echo "$cache/$1-$(sha256sum <"$here/pause.c" | cut -c1-12)" ;;
    oldest) echo "$cache/kubernetes-${version[oldest]}" ;;
    *) echo "$cache/$1-${version[$1]}" ;;
    esac
}

# missing COMPONENT:PROGRAM,...: those of its programs that are not there.
missing() {
    local program
    for program in $(tr , ' ' <<<"${1#*:}"); do
        [ -x "$(place "${1%%:*}")/$program" ] || echo "$program"
    done
}

duration() { printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); }

# quietly WHAT COMMAND...: a command of Go, whose many lines are counted instead of shown; all of them if it fails.
quietly() {
    local what=$1 log=$work/log began=$SECONDS said=$SECONDS pid
    shift
    "$@" >"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if [ $((SECONDS - said)) -ge 15 ]; then
            said=$SECONDS
            say "$label: $what, $(duration $((SECONDS - began))): $(grep -c '^go: downloading' "$log") modules fetched, $(grep -vc '^go: ' "$log") packages compiled"
        fi
    done
    if ! wait "$pid"; then
        say "$label: $what failed:"
        cat "$log" >&2
        return 1
    fi
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
    (cd "$work" && GOBIN=$work/out quietly compiling go install -v "${flags[@]}" "${@/%/@v${version[$component]}}")
}

# kubernetes VERSION PROGRAM...
kubernetes() {
    local v=$1 published
    shift
    mkdir -p "$work/kubernetes-$v"
    cd "$work/kubernetes-$v"
    # Its go.mod names its staging modules as v0.0.0: each is replaced by its published twin.
    published=$(go mod download -json "k8s.io/kubernetes@v$v" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
    {
        printf 'module hearth/kubernetes\n\ngo 1.26.0\n\nrequire k8s.io/kubernetes v%s\n\n' "$v"
        awk -v twin="v0.${v#1.}" '$2 == "v0.0.0" && $1 ~ /^k8s.io\// {print "replace " $1 " => " $1 " " twin}' "$published"
        printf 'tool k8s.io/kubernetes/cmd/%s\n' "$@"
    } >go.mod
    quietly "finding modules" go mod tidy
    quietly compiling go build -v -o "$work/out/" -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$v" \
        "${@/#/k8s.io/kubernetes/cmd/}"
}

etcd() {
    # Its go.mod has replace lines, which `go install` refuses: so a module of ours requires it.
    mkdir -p "$work/etcd"
    cd "$work/etcd"
    printf 'module hearth/etcd\n\ngo 1.26.0\n\nrequire go.etcd.io/etcd/server/v3 v%s\n\ntool go.etcd.io/etcd/server/v3\n' \
        "${version[etcd]}" >go.mod
    quietly "finding modules" go mod tidy
    quietly compiling go build -v "${flags[@]}" -o "$work/out/etcd" go.etcd.io/etcd/server/v3
}

# build COMPONENT PROGRAM...: the programs, in $work/out.
build() {
    local component=$1
    shift
    case $component in
    kubernetes | oldest) kubernetes "${version[$component]}" "$@" ;;
    etcd) etcd ;;
    containerd) install containerd github.com/containerd/containerd/v2/cmd/{containerd,containerd-shim-runc-v2,ctr} ;;
    runc)
        # Without the seccomp tag a Pod with seccompProfile RuntimeDefault cannot start.
        flags=(-tags "seccomp netgo osusergo" -ldflags "-s -w -linkmode external -extldflags -static")
        CGO_ENABLED=1 install runc github.com/opencontainers/runc
        ;;
    cni) install cni github.com/containernetworking/plugins/plugins/{main/bridge,main/loopback,ipam/host-local,meta/portmap} ;;
    helm) install helm helm.sh/helm/v4/cmd/helm ;;
    coredns) install coredns github.com/coredns/coredns ;;
    metrics-server) install metrics-server sigs.k8s.io/metrics-server/cmd/metrics-server ;;
    fake-gpu) (cd "$here/fake-gpu" && go build "${flags[@]}" -o "$work/out/fake-gpu" .) ;;
    pause) cc -O2 -static -s -o "$work/out/pause" "$here/pause.c" ;;
    esac
}

if [ "$goal" = directories ]; then
    # It must not stand in for the cluster's own where nobody asks for it.
    [ "${2:-}" != oldest ] || place oldest
    for name in "${!version[@]}" fake-gpu pause; do
        [ "$name" = oldest ] || place "$name"
    done
    exit
fi

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
# What a build that was killed left.
rm -rf "$cache"/.build.*
work=$(mktemp -d "$cache/.build.XXXXXX")
trap 'rm -rf "$work"' EXIT
export GOFLAGS=-buildvcs=false CGO_ENABLED=0

wanted=()
for component in "${components[@]}"; do
    [ -n "$(missing "$component")" ] || continue
    wanted+=("$component")
    if [ "$component" != pause:pause ] && ! command -v go >/dev/null; then
        say "${component%%:*} is not built, and there is no Go to build it with: see https://go.dev/dl"
        exit "$no_go"
    fi
done

number=0
for component in "${wanted[@]}"; do
    name=${component%%:*} began=$SECONDS
    number=$((number + 1))
    label="$(basename "$(place "$name")") ($number of ${#wanted[@]})"
    mapfile -t programs < <(missing "$component")
    say "$label: building ${programs[*]}, once"
    mkdir -p "$work/out"
    (
        flags=(-ldflags "-s -w")
        build "$name" "${programs[@]}"
    )
    keep "$name"
    say "$label: built in $(duration $((SECONDS - began)))"
done
