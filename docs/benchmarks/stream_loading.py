#!/usr/bin/env python3
"""Stream loading on a modelled device: prefill beside its bound, for balances of copies and computation.

    docs/benchmarks/stream_loading.py WORKER MODEL [--rings 2,3,8,64] [--compute 0.1,0.2,…]

WORKER is a hearth-worker, MODEL a checkpoint that it can run (`hearth-worker random --config
docs/benchmarks/configs/deepseek-v3-small.json --dtype fp8 --out MODEL`). Each line is one run whose late operations were
at most 1 %; a run with more is repeated. `bound` is the larger of the sums of copies and of computation. `simulated` is what a
ring of as many slots takes with the copies and operations of that run: a copy begins when the link and the slot are free, an
operation when the one before it has ended and its expert has arrived. Python's standard library is all it needs.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

LINK = "copy=1GB/s,read=500GB/s,launch=5us"
BALANCES = "0.3,0.5,0.7,0.9,1.1,1.25,1.4,1.6,2.0,2.6,4.0,8.0"


def lanes(trace):
    """Copies and operations of the first pass, as (begin, µs, name), and its µs."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    whole = next(e for e in events if "ts" in e and names[e["tid"]] == "host")
    end = whole["ts"] + whole["dur"]

    def of(lane):
        timed = [e for e in events if "dur" in e and names[e["tid"]] == lane]
        return sorted((e["ts"], e["dur"], e["name"]) for e in timed if whole["ts"] <= e["ts"] < end)

    return of("copy"), of("compute"), whole["dur"]


def simulate(copies, operations, slots):
    """µs of the pass in a ring of so many slots, with nothing but the device in the way."""
    experts = []  # (module, µs) in the order of the link
    for _, took, name in copies:
        if experts and experts[-1][0] == name:
            experts[-1][1] += took
        else:
            experts.append([name, took])
    used = [index for index, operation in enumerate(operations) if re.fullmatch(r"expert \d+", operation[2])]
    number = lambda name: int(name.split()[-1])
    link = now = 0.0
    ends, arrived, position, copied = [], [], 0, 0
    free = [0.0] * slots
    for index, (_, took, name) in enumerate(operations):
        if position < len(used) and used[position] == index:
            while copied <= position and copied < len(experts):
                link = max(link, free[copied % slots]) + experts[copied][1]
                arrived.append(link)
                copied += 1
            if number(experts[position][0]) != number(name):
                raise SystemExit(f"{experts[position][0]} was copied where {name} ran: not every copied expert was chosen")
            now = max(now, arrived[position]) + took
            free[position % slots] = now
            position += 1
        else:
            now += took
    return now


def run(worker, model, ring, compute, tokens, stretch):
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        device = f"virtual:memory=4Gi,mode=modelled,{LINK},compute={compute}TFLOPS,stretch={stretch}"
        command = [worker, "bench", "--model", model, "--device", device, "--residency", "stream-loading"]
        command += ["--ring-slots", str(ring), "--prefill", str(tokens), "--chunk", str(tokens), "--decode", "1"]
        command += ["--json", "--trace", str(trace)]
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        copies, operations, _ = lanes(trace)
    return report["prefill_lanes"], simulate(copies, operations, ring) / 1e3, copies, operations


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker")
    parser.add_argument("model")
    parser.add_argument("--rings", default="2,3,8,64")
    parser.add_argument("--compute", default=BALANCES, help="TFLOPS of the device")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--stretch", type=float, default=10)
    parser.add_argument("--tries", type=int, default=5)
    args = parser.parse_args()
    print("| ring | compute, TFLOPS | copies, ms | computation, ms | wall, ms | wall / bound | wall / simulated | overlap | late |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for ring in map(int, args.rings.split(",")):
        for compute in args.compute.split(","):
            for _ in range(args.tries):
                used, simulated_ms, _, _ = run(args.worker, args.model, ring, compute, args.tokens, args.stretch)
                if not used["is_void"]:
                    break
            late = used["late_operations"] / used["operations"]
            print(
                f"| {ring} | {compute} | {used['copy_ms']:.1f} | {used['compute_ms']:.1f} | {used['wall_ms']:.1f} "
                f"| {used['over_bound']:.3f} | {used['wall_ms'] / simulated_ms:.3f} | {used['overlap']:.2f} "
                f"| {100 * late:.2f} %{' (void)' if used['is_void'] else ''} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
