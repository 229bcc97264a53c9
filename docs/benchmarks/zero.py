#!/usr/bin/env python3
"""Time to the first token of a deployment without workers (decode.scaling.minReplicas: 0), and its parts.

    docs/benchmarks/zero.py NAME URL [--namespace default] [--rounds 5] [--drop PATH]

NAME is an InferenceDeployment that scales to zero, of the cluster that kubectl talks to; URL its endpoint, with /v1. Each round waits
until the workers have ended, asks, and watches the Pods meanwhile: when the decode worker's Pod was created, when its container ran,
when Kubernetes called it ready, and when the first token came, which may be sooner: the gateway asks workers by itself. With --drop
the files below PATH are dropped from this machine's page cache before each round, so that the weights are read from disk: PATH is the
model, and this machine its node. Then the rate at which they were read, from when the container ran to the first token, is compared
with that of reading the files alone, measured before each round. Python's standard library is all it needs.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import threading
import time
import urllib.request

PARTS = ["Pod created", "container runs", "Pod ready", "first token"]
# Seconds that Kubernetes may take to call a Pod ready after its first token.
READY_S = 30


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
        seen.setdefault(PARTS[0], now)
        if any("running" in it.get("state", {}) for it in status.get("containerStatuses", [])):
            seen.setdefault(PARTS[1], now)
        if any(it["type"] == "Ready" and it["status"] == "True" for it in status.get("conditions", [])):
            seen.setdefault(PARTS[2], now)


def first_token(args):
    body = {"model": args.model, "prompt": "What is Hearth?", "max_tokens": 1, "stream": True}
    request = urllib.request.Request(f"{args.url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=1200) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                return time.monotonic()
    raise SystemExit("the answer has no token")


def drop(path):
    for file in files(path):
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def files(path):
    return [file for file in pathlib.Path(path).rglob("*") if file.is_file()]


def read_s(path):
    """Seconds to read all files from the disk, one after the other."""
    drop(path)
    began, buffer = time.monotonic(), bytearray(8 << 20)
    for file in files(path):
        with open(file, "rb", buffering=0) as source:
            while source.readinto(buffer):
                pass
    drop(path)
    return time.monotonic() - began


def measure(args):
    """Seconds from the question to each part."""
    command = ["kubectl", "--namespace", args.namespace, "get", "pods", "--watch-only", "-o", "json", "-l", selector(args, "decode")]
    process, seen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True), {}
    threading.Thread(target=watch, args=(args, seen, process), daemon=True).start()
    time.sleep(2)
    began = time.monotonic()
    seen[PARTS[3]] = first_token(args)
    while PARTS[2] not in seen and time.monotonic() < seen[PARTS[3]] + READY_S:
        time.sleep(0.1)
    process.terminate()
    missing = [part for part in PARTS if part not in seen]
    if missing:
        raise SystemExit(f"no Pod came so far: {', '.join(missing)}")
    return [seen[part] - began for part in PARTS]


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
    columns = [f"{part}, s" for part in PARTS] + (["files alone, s", "of their rate"] if args.drop else [])
    print("| round | " + " | ".join(columns) + " |\n| --- |" + " --- |" * len(columns), flush=True)
    for number in range(1, args.rounds + 1):
        wait_until_at_zero(args)
        alone_s = [read_s(args.drop)] if args.drop else []
        times = measure(args)
        shares = [alone / (times[3] - times[1]) for alone in alone_s]
        rounds.append(times + alone_s + shares)
        print(f"| {number} | " + " | ".join(f"{it:.2f}" for it in rounds[-1]) + " |", flush=True)
    medians = [statistics.median(column) for column in zip(*rounds)]
    print("| median | " + " | ".join(f"{it:.2f}" for it in medians) + " |")


if __name__ == "__main__":
    main()
