#!/usr/bin/env bash
# Writes what is generated from others: the chart's copy of the CustomResourceDefinitions (from crds/yaml) and
# manifests/install.yaml (from the chart, with its default values).
#   scripts/manifests.sh [DIRECTORY]    DIRECTORY instead of the working tree, for comparing
# Needs helm: the one of the test cluster (tests/cluster/build.sh), or that of the system.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}

helm=$(for directory in $(tests/cluster/build.sh directories); do
    if [ -x "$directory/helm" ]; then echo "$directory/helm"; fi
done | head -n 1)
helm=${helm:-$(command -v helm || true)}
if [ -z "$helm" ]; then
    echo "manifests: there is no helm; run tests/cluster/build.sh, or install it" >&2
    exit 3
fi

# The chart is rendered where its copies are new.
chart=$(mktemp -d)
trap 'rm -rf "$chart"' EXIT
cp -R charts/hearth "$chart/"
rm -rf "$chart/hearth/files/crds"
mkdir -p "$chart/hearth/files/crds" "$out/charts/hearth/files/crds" "$out/manifests"
cp crds/yaml/*.yaml "$chart/hearth/files/crds/"
cp crds/yaml/*.yaml "$out/charts/hearth/files/crds/"

{
    cat <<'END'
# Hearth with the chart's default values, in namespace hearth-system, serving InferenceDeployments of namespace default.
#   kubectl apply -f manifests/install.yaml
#   kubectl delete -f manifests/install.yaml     # removes all InferenceDeployments too
# Generated from charts/hearth by `make manifests`; what is changed here is lost.
apiVersion: v1
kind: Namespace
metadata:
  name: hearth-system
  labels:
    app.kubernetes.io/name: hearth
    # The agents use a directory of their nodes; everything else here satisfies `restricted`.
    pod-security.kubernetes.io/enforce: privileged
    pod-security.kubernetes.io/warn: privileged
END
    "$helm" template hearth "$chart/hearth" --namespace hearth-system --no-hooks --skip-tests --set crds.keep=false |
        sed -e '/^# Source: /d' -e '/helm\.sh\/chart:/d' -e 's/managed-by: Helm$/managed-by: kubectl/'
} >"$out/manifests/install.yaml"
