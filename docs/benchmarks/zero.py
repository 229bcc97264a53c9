#!/usr/bin/env python3
"""Time to the first token of a deployment without workers (decode.scaling.minReplicas: 0), and its parts.

    docs/benchmarks/zero.py NAME URL [--namespace default] [--rounds 5] [--drop PATH]

NAME is an InferenceDeployment that scales to zero, of the cluster that kubectl talks to; URL its endpoint, with /v1. Each round waits
until the workers have ended, asks, and watches the Pods meanwhile: when the decode worker's Pod was created, when its container ran,
when it said that all weights are in memory (its log, by the node's clock), when the first token came, and when Kubernetes called the
Pod ready, which may be later: the gateway asks workers by itself. With --drop the files below PATH are dropped from this machine's page
cache before each round, so that the weights are read from disk: PATH is the model, and this machine its node. Then the rate at which
they were read, from when the worker's process began, before its container was complete, until they were in memory, is compared with
what the disk gives: all files read past the page cache, several blocks at once, with the number at once that was fastest in this round.
So is, in the last column, the rate that counts all until the first token. Needs Linux, and root with --drop, but only Python's standard
library.
"""

import argparse
import concurrent.futures
import ctypes
import datetime
import json
import mmap
import os
import pathlib
import statistics
import subprocess
import threading
import time
import urllib.request

CREATED, RUNS, LOADED, TOKEN, READY = PARTS = ["Pod created", "container runs", "weights in memory", "first token", "Pod ready"]
DROPPED = ["process began, s", "disk alone, s", "of its rate", "of its rate until the first token"]
# Seconds that Kubernetes may take to call a Pod ready after its first token.
READY_S = 30
# Reads from the disk: bytes of each, and how many are under way at once.
BLOCK_BYTES = 1 << 20
DEPTHS = (1, 4, 8, 16)


def kubectl(args, *more):
    command = ["kubectl", "--namespace", args.namespace, *more]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def selector(args, role):
    return f"hearth.dev/deployment={args.name},hearth.dev/role={role}"


def wait_until_at_zero(args):
    while True:
        found = json.loads(kubectl(args, "get", "infd", args.name, "--output=json"))
        is_at_zero = found.get("status", {}).get("scaleToZero", {}).get("atZero", False)
        left = [role for role in ("prefill", "decode") if kubectl(args, "get", "pods", "-l", selector(args, role), "-o", "name")]
        if is_at_zero and not left:
            return
        time.sleep(1)


def watch(args, seen, process):
    """Notes when the decode worker's Pod reaches each state, by this machine's clock."""
    decoder, text = json.JSONDecoder(), ""
    for line in process.stdout:
        text += line
        try:
            pod, end = decoder.raw_decode(text)
        except json.JSONDecodeError:
            continue
        text = text[end:].lstrip()
        now, status = time.monotonic(), pod.get("status", {})
        seen.setdefault(CREATED, now)
        seen["name"] = pod["metadata"]["name"]
        if any("running" in it.get("state", {}) for it in status.get("containerStatuses", [])):
            seen.setdefault(RUNS, now)
        if any(it["type"] == "Ready" and it["status"] == "True" for it in status.get("conditions", [])):
            seen.setdefault(READY, now)


def first_token(args):
    body = {"model": args.model, "prompt": "What is Hearth?", "max_tokens": 1, "stream": True}
    request = urllib.request.Request(f"{args.url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=1200) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                return time.monotonic()
    raise SystemExit("the answer has no token")


def files(path):
    return [file for file in pathlib.Path(path).rglob("*") if file.is_file() and file.stat().st_size]


def drop(path):
    """Drops the files from the page cache, and makes sure that they are not there any more."""
    for file in files(path):
        with open(file, "rb") as source:
            # What is still to be written would stay.
            os.fdatasync(source.fileno())
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            cached = cached_bytes(source)
        if cached > BLOCK_BYTES:
            raise SystemExit(f"{file}: {cached >> 20} MiB stay in the page cache; who has it open?")


def cached_bytes(source):
    pages = mmap.mmap(source.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    held = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
    begin = ctypes.c_ubyte.from_buffer(pages)
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(len(pages)), held):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(it & 1 for it in held) * mmap.PAGESIZE


def read_s(path, depth):
    """Seconds to read all files from the disk past the page cache, so many blocks at once."""
    own = threading.local()

    def begin():
        own.buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)

    def read(block):
        return os.preadv(block[0], [own.buffer], block[1])

    sizes = {os.open(file, os.O_RDONLY | os.O_DIRECT): file.stat().st_size for file in files(path)}
    blocks = [(handle, at) for handle, size in sizes.items() for at in range(0, size, BLOCK_BYTES)]
    with concurrent.futures.ThreadPoolExecutor(depth, initializer=begin) as pool:
        began = time.monotonic()
        count = sum(pool.map(read, blocks))
        took_s = time.monotonic() - began
    for handle in sizes:
        os.close(handle)
    if count != sum(sizes.values()):
        raise SystemExit(f"{count} of {sum(sizes.values())} bytes were read")
    return took_s


def process_began():
    """When the newest process of a decode worker began, by this machine's clock."""
    since_boot = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            ticks = int((process / "stat").read_text().rpartition(")")[2].split()[19])
        except OSError:
            continue
        if command[0].endswith(b"hearth-worker") and command[1] == b"decode":
            since_boot.append(ticks / os.sysconf("SC_CLK_TCK"))
    if not since_boot:
        raise SystemExit("no process of a decode worker is here: with --drop this machine must be its node")
    return max(since_boot) + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


def loaded(args, name):
    """When the worker of this Pod said that all weights are in memory, by this machine's clock; None if it does not."""
    lines = kubectl(args, "logs", name, "--timestamps").splitlines()
    at = [line.split()[0] for line in lines if '"event":"loading"' in line and '"percent":100' in line]
    if not at:
        return None
    # Python knows no nanoseconds.
    date, _, fraction = at[0].removesuffix("Z").partition(".")
    since_1970 = datetime.datetime.fromisoformat(date + "+00:00").timestamp() + float("0." + (fraction or "0"))
    return since_1970 + time.monotonic() - time.time()


def measure(args):
    """Seconds from the question to each part, and with --drop to the worker's process."""
    command = ["kubectl", "--namespace", args.namespace, "get", "pods", "--watch-only", "-o", "json", "-l", selector(args, "decode")]
    process, seen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), {}
    threading.Thread(target=watch, args=(args, seen, process), daemon=True).start()
    time.sleep(2)
    began = time.monotonic()
    seen[TOKEN] = first_token(args)
    while READY not in seen and time.monotonic() < seen[TOKEN] + READY_S:
        time.sleep(0.1)
    process.terminate()
    if "name" in seen and (at := loaded(args, seen["name"])):
        seen[LOADED] = at
    missing = [part for part in PARTS if part not in seen]
    if missing:
        raise SystemExit(f"no Pod came so far: {', '.join(missing)}")
    process = [process_began()] if args.drop else []
    return [it - began for it in [seen[part] for part in PARTS] + process]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("url")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drop")
    args = parser.parse_args()
    with urllib.request.urlopen(f"{args.url}/models") as models:
        args.model = json.load(models)["data"][0]["id"]
    rounds = []
    columns = [f"{part}, s" for part in PARTS] + (DROPPED if args.drop else [])
    print("| round | " + " | ".join(columns) + " |\n| --- |" + " --- |" * len(columns), flush=True)
    for number in range(1, args.rounds + 1):
        wait_until_at_zero(args)
        more = []
        if args.drop:
            more = [min(read_s(args.drop, depth) for depth in DEPTHS)]
            drop(args.drop)
        times = measure(args)
        if args.drop:
            of_part = dict(zip(PARTS, times))
            more += [more[0] / (of_part[part] - times[-1]) for part in (LOADED, TOKEN)]
        rounds.append(times + more)
        print(f"| {number} | " + " | ".join(f"{it:.2f}" for it in rounds[-1]) + " |", flush=True)
    medians = [statistics.median(column) for column in zip(*rounds)]
    print("| median | " + " | ".join(f"{it:.2f}" for it in medians) + " |")


if __name__ == "__main__":
    main()
