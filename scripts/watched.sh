#!/usr/bin/env bash
# What `make test` runs a test program by: one that hangs is stopped, and named, so that the others still tell what they found.
limit_s=${HEARTH_TEST_LIMIT_S:-3000}
# It has a group of its own, which ends with it, and passes signals on to that.
timeout --kill-after=30s "$limit_s" "$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' INT TERM HUP
wait "$child"
code=$?
# A signal ends the wait, not the program.
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    code=$?
done
if [ "$SECONDS" -ge "$limit_s" ]; then
    echo "test: ${1##*/} was stopped: it had not ended after $limit_s s" >&2
fi
exit "$code"
