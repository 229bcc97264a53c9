#!/usr/bin/env bash
# README's two commands on a machine that has nothing: `make demo CI=1` and `make test` in a clone of this repository's HEAD, in a
# fresh root of the distribution's packages with an empty HOME and no caches, as root and as a user. Needs root and debootstrap.
#   scripts/clean-room.sh [OPTION]... [root|user]... [demo|test]...     both users and both commands where none is named
#     --dir DIR        where the roots and logs are (default: /var/tmp/hearth-clean-room); about 15 GB
#     --suite NAME     the distribution's release (default: bookworm)
#     --mirror URL     where its packages come from (default: debootstrap's)
#     --resume         go on in the rooms of the last call: what has passed there is not run again
#     --rust DIR       a Rust toolchain (the directory with bin/cargo), where rustup's cannot be had
#     --go DIR         a Go toolchain (the directory with bin/go), for the tests on Kubernetes; without, they are skipped
#     --ca FILE        a certificate that the machine trusts besides the distribution's; may be repeated
#     --env NAME       a variable to carry in, such as HTTPS_PROXY or PIP_CERT; may be repeated
# Says one line a command, and of one that fails the end of its log. Ends with 1 when one failed.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=/var/tmp/hearth-clean-room suite=bookworm mirror='' resume='' rust='' go='' authorities=() variables=() users=() goals=()
while [ $# -gt 0 ]; do
    case $1 in
    --dir | --suite | --mirror | --rust | --go) declare "${1#--}=${2:?$1 needs a value}" && shift ;;
    --ca) authorities+=("$(realpath "${2:?--ca needs a file}")") && shift ;;
    --env) variables+=("${2:?--env needs a name}") && shift ;;
    --resume) resume=yes ;;
    root | user) users+=("$1") ;;
    demo | test) goals+=("$1") ;;
    *)
        echo "clean-room: '$1' is none of its words; see the first lines of $0" >&2
        exit 2
        ;;
    esac
    shift
done
[ ${#users[@]} -gt 0 ] || users=(root user)
[ ${#goals[@]} -gt 0 ] || goals=(demo test)

say() { printf 'clean-room: %s\n' "$*"; }
fail() {
    say "$*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || fail "a root can be entered by root alone: run it with sudo"
command -v debootstrap >/dev/null || fail "debootstrap is missing; please run: apt-get install -y debootstrap"
for toolchain in ${rust:+"$rust/bin/cargo"} ${go:+"$go/bin/go"}; do
    [ -x "$toolchain" ] || fail "$toolchain is no program: --rust and --go name the directory above bin"
done
mkdir -p "$dir"
# One call at a time: two would make the same rooms.
exec 9>"$dir/.lock"
flock -n 9 || fail "another call works in $dir; name a directory of its own with --dir"

# run ROOM USER COMMAND: a shell command in a room, which sees the machine's devices and network and nothing else of it. All that it
# started ends with it.
run() {
    local room=$1 user=$2 command=$3 home=/root path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin name
    local environment=(LANG=C.UTF-8 TERM=dumb)
    [ "$user" = root ] || home=/home/$user
    [ -z "$rust" ] || path=/opt/rust/bin:$path
    [ -z "$go" ] || path=/opt/go/bin:$path
    for name in "${variables[@]}"; do
        [ -z "${!name+set}" ] || environment+=("$name=${!name}")
    done
    unshare --mount --uts --ipc --pid --fork --kill-child bash -euc '
        room=$1 rust=$2 go=$3 user=$4
        shift 4
        mount --make-rprivate /
        mount --bind "$room" "$room"
        mount --rbind /dev "$room/dev"
        mount --rbind /sys "$room/sys"
        mount -t proc proc "$room/proc"
        [ -z "$rust" ] || mount --bind "$rust" "$room/opt/rust"
        [ -z "$go" ] || mount --bind "$go" "$room/opt/go"
        cd "$room"
        mkdir -p .outside
        pivot_root . .outside
        umount -l /.outside
        cd /
        exec setpriv --reuid "$user" --regid "$user" --init-groups env -i "$@"
    ' bash "$room" "$rust" "$go" "$user" "${environment[@]}" HOME="$home" USER="$user" PATH="$path" \
        bash -c "cd ~ && $command" </dev/null
}

# What a person has who has cloned the repository: the distribution, make, git.
make_base() {
    [ -e "$dir/base-$suite/.complete" ] && return
    say "making a root of $suite, once"
    rm -rf "$dir/base-$suite"
    debootstrap --variant=minbase --include=make,git,ca-certificates "$suite" "$dir/base-$suite" ${mirror:+"$mirror"} >"$dir/debootstrap.log" 2>&1 ||
        fail "debootstrap failed; its log is $dir/debootstrap.log"
    touch "$dir/base-$suite/.complete"
}

make_room() {
    local room=$1 user=$2 sources
    rm -rf "$room"
    cp -a "$dir/base-$suite" "$room"
    # Updates of the suite, as an installed machine has them.
    sources=$(sed -n 's/^deb \([^ ]*\) .*/\1/p' "$room/etc/apt/sources.list" | head -1)
    echo "deb $sources $suite-updates main" >>"$room/etc/apt/sources.list"
    mkdir -p "$room/opt/rust" "$room/opt/go"
    for file in /etc/resolv.conf /etc/hosts; do
        [ ! -e "$file" ] || cp -L "$file" "$room$file"
    done
    for file in "${authorities[@]}"; do
        cp "$file" "$room/usr/local/share/ca-certificates/$(basename "$file" | sed 's/\.[a-z]*$//').crt"
    done
    run "$room" root update-ca-certificates >/dev/null 2>&1
    [ "$user" = root ] || run "$room" root "useradd --create-home --shell /bin/bash $user"
    git clone -q --no-hardlinks . "$room/hearth"
    if [ "$user" = root ]; then
        mv "$room/hearth" "$room/root/hearth"
    else
        mv "$room/hearth" "$room/home/$user/hearth"
        run "$room" root "chown -R $user: /home/$user/hearth"
    fi
}

# attempt ROOM USER GOAL LOG
attempt() {
    local target=$3
    [ "$target" = test ] || target="demo CI=1"
    run "$1" "$2" "cd hearth && make $target" >>"$4" 2>&1
}

failed=0
make_base
for user in "${users[@]}"; do
    room=$dir/$user
    if [ -z "$resume" ] || [ ! -d "$room/proc" ]; then
        make_room "$room" "$user"
        rm -f "$dir/$user".*.passed
    fi
    for goal in "${goals[@]}"; do
        log=$dir/$user.$goal.log passed=$dir/$user.$goal.passed
        if [ -e "$passed" ]; then
            say "$user: make $goal: passed before"
            continue
        fi
        began=$SECONDS
        : >"$log"
        outcome=passed
        if ! attempt "$room" "$user" "$goal" "$log"; then
            # A user is told what to run as root, once, and then goes on.
            line=$(sed -n 's/^bootstrap: *sudo \(apt-get install .*\)$/\1/p' "$log" | tail -1)
            if [ "$user" = root ] || [ -z "$line" ] ||
                ! run "$room" root "apt-get update -qq && DEBIAN_FRONTEND=noninteractive $line" >>"$log" 2>&1 ||
                ! attempt "$room" "$user" "$goal" "$log"; then
                outcome=FAILED
            fi
        fi
        say "$user: make $goal: $outcome after $(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s$(
            sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed; \([0-9]*\) ignored.*/\1 \2 \3/p' "$log" |
                awk '{p += $1; f += $2; i += $3} END {if (NR) printf ", %d tests passed, %d failed, %d ignored", p, f, i}'
        )$(grep -c '^SKIPPED' "$log" | sed -n 's/^\([1-9][0-9]*\)$/, \1 skipped/p')"
        if [ "$outcome" = passed ]; then
            touch "$passed"
        else
            failed=1
            tail -40 "$log" | sed 's/^/    /'
            say "$user: the whole log is $log"
        fi
    done
done
exit $failed
