#!/usr/bin/env bash
# Makes a release of a version, whose files have the same bytes whenever they are made from the same programs:
#   hearth.tar, hearth-worker.tar            images for amd64 and arm64, in OCI layout
#   hearth-VERSION.tgz                       the chart
#   install.yaml                             the same without helm
#   hearth.cdx.json, hearth-worker.cdx.json  what the programs are built from (CycloneDX)
#   hearth-VERSION-bundle.tar                all of these with models, for nodes without internet, with --store
#   SHA256SUMS
#
#   scripts/release.sh [OPTION]... VERSION
#     --output DIR         where to (default: dist)
#     --platform PLATFORM  amd64 or arm64; may be repeated (default: both)
#     --registry REGISTRY  what images, chart and install.yaml name (default: the chart's image.registry)
#     --push REGISTRY      the same, and pushes the images and the chart (to REGISTRY/charts) there; needs skopeo and helm
#     --store DIR          a store of models that `hearth models pull` filled: $HEARTH_CACHE, or ~/.cache/hearth
#     --model NAME         a model of the store; may be repeated (default: all)
#     --programs DIR       programs that are built already: DIR/PLATFORM/hearth and DIR/PLATFORM/hearth-worker
#     --kernels DIR        kernels that `hearth-worker cuda-compile` wrote already
#     --tool FILE          the hearth-release program that is built already
# A platform that is not this machine's needs Rust's target and a C cross toolchain. rustup adds the one, and root on Debian gets the
# other; what is missing otherwise is said first.
set -euo pipefail
# Paths are of where it is called from.
called_from=$PWD
cd "$(dirname "$0")/.."
export LC_ALL=C

say() { printf 'release: %s\n' "$*" >&2; }
fail() {
    say "$@"
    exit 1
}
usage() {
    say "$*; see the first lines of $0"
    exit 2
}

# Rust's name of a platform.
triple_of() {
    case $1 in
    amd64) echo x86_64-unknown-linux-gnu ;;
    arm64) echo aarch64-unknown-linux-gnu ;;
    *) return 1 ;;
    esac
}

# Its C toolchain's.
gnu_of() { triple_of "$1" | sed 's/-unknown//'; }

output=$PWD/dist registry='' push='' store='' programs='' kernels='' tool='' version='' platforms=() models=()
while [ $# -gt 0 ]; do
    case $1 in
    --registry | --push) declare "${1#--}=${2:?$1 needs a value}" && shift ;;
    --output | --store | --programs | --kernels | --tool)
        declare "${1#--}=$(cd "$called_from" && realpath -m "${2:?$1 needs a value}")" && shift
        ;;
    --platform)
        triple_of "${2:?--platform needs a value}" >/dev/null || usage "there are no images for $2: --platform is amd64 or arm64"
        platforms+=("$2") && shift
        ;;
    --model) models+=(--model "${2:?--model needs a value}") && shift ;;
    -*) usage "'$1' is none of its options" ;;
    *)
        [ -z "$version" ] || usage "'$1' is one word too many"
        version=$1
        ;;
    esac
    shift
done
[ -n "$version" ] || usage "which version? Cargo.toml has $(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)"
[ ${#platforms[@]} -gt 0 ] || platforms=(amd64 arm64)
registry=${push:-${registry:-$(sed -n 's/^  registry: //p' charts/hearth/values.yaml)}}

# What is released is a commit, and says its version everywhere.
check_source() {
    local file field found changed others
    while read -r file field; do
        found=$(sed -n "s/^$field *[:=] *\"\\{0,1\\}\\([^\"]*\\)\"\\{0,1\\}\$/\\1/p" "$file" | head -n 1)
        [ "$found" = "$version" ] ||
            fail "$file: $field is $found, and $version is to be released: set it, or name the other version"
    done <<'END'
Cargo.toml version
charts/hearth/Chart.yaml version
charts/hearth/Chart.yaml appVersion
END
    changed=$(git status --porcelain) || fail "this is no git checkout, and a release is made of a commit"
    [ -z "$changed" ] ||
        fail "the tree has changes that no commit has; commit or remove them:" $'\n'"$(head -n 5 <<<"$changed")"
    # A release takes the place of one, and of nothing else.
    if [ -e "$output" ]; then
        others=$(comm -23 <(ls -A "$output" | grep -vx SHA256SUMS | sort) <(cut -c 67- "$output/SHA256SUMS" 2>/dev/null | sort))
        [ -z "$others" ] ||
            fail "$output has files in it that are of no release: remove them, or name another directory with --output:" \
                $'\n'"$(head -n 5 <<<"$others")"
    fi
}

add_target() { command -v rustup >/dev/null && rustup target add "$1" >&2; }

# Installs a Debian package where nobody has to be asked for it.
install_package() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return
    say "installing $1"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >&2
}

check_tools() {
    local platform triple gnu runs_here='' missing=()
    if [ -n "$push" ]; then
        command -v skopeo >/dev/null || missing+=("skopeo, to push images (Debian's package skopeo)")
        command -v helm >/dev/null || missing+=("helm, to push the chart (https://helm.sh)")
    fi
    for platform in "${platforms[@]}"; do
        triple=$(triple_of "$platform") gnu=$(gnu_of "$platform")
        [ "$triple" != "$host" ] || runs_here=yes
        if [ -n "$programs" ]; then
            for program in hearth hearth-worker; do
                [ -f "$programs/$platform/$program" ] || missing+=("$programs/$platform/$program, which --programs should have")
            done
            continue
        fi
        [ -d "$(rustc --print target-libdir --target "$triple")" ] || add_target "$triple" ||
            missing+=("Rust's standard library for $platform: rustup target add $triple")
        [ "$triple" = "$host" ] || command -v "$gnu-g++" >/dev/null || install_package "crossbuild-essential-$platform" ||
            missing+=("a C toolchain for $platform ($gnu-g++): apt-get install crossbuild-essential-$platform")
    done
    [ -n "$kernels$runs_here" ] ||
        missing+=("a program of ${platforms[*]} that runs here, to compile kernels: name a directory with --kernels, or this machine's --platform too")
    [ ${#missing[@]} -eq 0 ] || fail "these are missing:" "$(printf '\n  %s' "${missing[@]}")"
}

# build PLATFORM: both programs of a platform, into $work/programs/PLATFORM.
build() {
    local platform=$1 triple gnu name
    triple=$(triple_of "$platform") gnu=$(gnu_of "$platform")
    name=${triple//-/_}
    (
        if [ "$triple" != "$host" ]; then
            export "CARGO_TARGET_${name^^}_LINKER=$gnu-gcc" "CC_$name=$gnu-gcc" "CXX_$name=$gnu-g++" "AR_$name=$gnu-ar"
        fi
        # Machines with 64-bit ARM have pages of up to 64 KiB, and the allocator must know the largest.
        [ "$platform" != arm64 ] || export JEMALLOC_SYS_WITH_LG_PAGE=16
        # Panics name source files, wherever these were on the machine that built them.
        export CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=$PWD=/hearth"$'\x1f'"--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
        cargo build --locked --profile image-operator --target "$triple" --bin hearth
        cargo build --locked --profile image --target "$triple" --bin hearth-worker
    )
    mkdir -p "$work/programs/$platform"
    cp "$target/$triple/image-operator/hearth" "$target/$triple/image/hearth-worker" "$work/programs/$platform/"
}

# The kernels are compiled by the worker itself, so by one that runs here.
compile_kernels() {
    local platform cache=${HEARTH_CACHE:-$HOME/.cache/hearth}
    for platform in "${platforms[@]}"; do
        [ "$(triple_of "$platform")" = "$host" ] || continue
        "$programs/$platform/hearth-worker" cuda-compile --arch "$(sed -n 's/^GPU_ARCHITECTURES = //p' Makefile)" --out "$work/kernels" \
            --nvrtc "$(echo "$cache"/py/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib)"
        kernels=$work/kernels
    done
}

check_source
if [ -z "$programs" ] || [ -z "$kernels" ]; then
    scripts/bootstrap.sh images
    # Where Rust is, if that has just installed it.
    export PATH="$HOME/.cargo/bin:$PATH"
fi
host=$(rustc -vV | sed -n 's/^host: //p')
target=${CARGO_TARGET_DIR:-target}
check_tools
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH

mkdir -p "$(dirname "$output")"
work=$(mktemp -d "$(dirname "$output")/.release-XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/dist"

if [ -z "$programs" ]; then
    for platform in "${platforms[@]}"; do
        say "building for $platform"
        build "$platform"
    done
    programs=$work/programs
fi
[ -n "$kernels" ] || compile_kernels
if [ -z "$tool" ]; then
    cargo build --locked --quiet -p hearth-release
    tool=$target/debug/hearth-release
fi

named=()
for platform in "${platforms[@]}"; do
    named+=(--operator "$programs/$platform/hearth" --worker "$programs/$platform/hearth-worker")
done
"$tool" images "${named[@]}" --kernels "$kernels" --registry "$registry" --output "$work/dist" >/dev/null
"$tool" chart --registry "$registry" --output "$work/dist" >/dev/null
"$tool" sbom --output "$work/dist" >/dev/null
default=$(sed -n 's/^  registry: //p' charts/hearth/values.yaml)
sed "s|\"${default//./\\.}/\\(hearth\\(-worker\\)\\{0,1\\}:${version//./\\.}\"\\)|\"$registry/\\1|" manifests/install.yaml >"$work/dist/install.yaml"
(cd "$work/dist" && sha256sum -- * >"$work/sums" && mv "$work/sums" SHA256SUMS)
if [ -n "$store" ]; then
    bundle=hearth-$version-bundle.tar
    "$tool" bundle --release "$work/dist" --store "$store" "${models[@]}" --output "$work/dist/$bundle" >/dev/null
    (cd "$work/dist" && sha256sum -- "$bundle" >>SHA256SUMS)
fi
rm -rf "$output"
mv "$work/dist" "$output"
(cd "$output" && du -h --apparent-size -- *)

if [ -n "$push" ]; then
    for name in hearth hearth-worker; do
        say "pushing $push/$name:$version"
        skopeo copy --all "oci-archive:$output/$name.tar" "docker://$push/$name:$version"
    done
    say "pushing oci://$push/charts/hearth:$version"
    helm push "$output/hearth-$version.tgz" "oci://$push/charts"
fi
