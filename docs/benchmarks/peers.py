#!/usr/bin/env python3
"""Ranks that read a prompt together (DSLP): time of a prompt against one rank's, and SmallEP against standard EP.

    docs/benchmarks/peers.py WORKER MODEL [--compute 0.15,0.2,0.25] [--tokens 640] [--rounds 5]

WORKER is a hearth-worker, MODEL a checkpoint that it can run (`hearth-worker random --config
docs/benchmarks/configs/deepseek-v3-small.json --dtype fp8 --out MODEL`). With 640 tokens of that model, a matrix of all rows takes
the same share of the link's time for a layer's experts as 20K tokens of DeepSeek-V3 do. Ranks are threads of one process, each
with a device: first a modelled one, whose rows cross its own link on their way to other ranks and back, then one CPU thread.
Modelled runs with more than 1 % late operations are repeated. Python's standard library is all it needs.
"""

import argparse
import json
import statistics
import subprocess

LINK = "copy=1GB/s,read=500GB/s,launch=5us"


def bench(args, peers, experts, more):
    command = [args.worker, "bench", "--model", args.model, "--peers", str(peers), "--experts", experts]
    command += ["--prefill", str(args.tokens), "--chunk", str(args.tokens), "--decode", "1", "--json", *more]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def modelled(args, compute, peers, experts):
    device = f"virtual:memory=4Gi,mode=modelled,{LINK},compute={compute}TFLOPS,stretch={args.stretch}"
    more = ["--device", device, "--residency", "stream-loading", "--ring-slots", str(args.slots)]
    for _ in range(args.tries):
        lanes = bench(args, peers, experts, more)["prefill_lanes"]
        if not lanes["is_void"]:
            break
    return lanes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker")
    parser.add_argument("model")
    parser.add_argument("--compute", default="0.15,0.2,0.25", help="TFLOPS of the modelled device")
    parser.add_argument("--tokens", type=int, default=640)
    parser.add_argument("--slots", type=int, default=16, help="slots of the ring")
    parser.add_argument("--peers", default="2,4", help="numbers of ranks")
    parser.add_argument("--stretch", type=float, default=40)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="rounds on CPU threads; 0: none")
    parser.add_argument("--cpu-tokens", type=int, default=1024)
    args = parser.parse_args()
    print("| compute, TFLOPS | ranks | experts | copies, ms | computation, ms | wall, ms | faster than one rank | late |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for compute in args.compute.split(","):
        alone_ms = None
        ways = [(1, "small-ep")] + [(int(n), way) for n in args.peers.split(",") for way in ("small-ep", "ep")]
        for peers, way in ways:
            lanes = modelled(args, compute, peers, way)
            alone_ms = alone_ms or lanes["wall_ms"]
            late = 100 * lanes["late_operations"] / lanes["operations"]
            name = "–" if peers == 1 else {"small-ep": "SmallEP", "ep": "EP"}[way]
            print(
                f"| {compute} | {peers} | {name} | {lanes['copy_ms']:.1f} | {lanes['compute_ms']:.1f} | {lanes['wall_ms']:.1f} "
                f"| {alone_ms / lanes['wall_ms']:.2f} | {late:.2f} %{' (void)' if lanes['is_void'] else ''} |",
                flush=True,
            )
    if args.rounds == 0:
        return
    args.tokens = args.cpu_tokens
    ratios = []
    for number in range(args.rounds):
        order = (1, 2) if number % 2 == 0 else (2, 1)
        reports = {n: bench(args, n, "small-ep", ["--threads", "1", "--prompts", "2"]) for n in order}
        if reports[1]["logits_sha256"] != reports[2]["logits_sha256"]:
            raise SystemExit("two ranks give other logits than one")
        ratios.append(reports[1]["prefill_ms"] / reports[2]["prefill_ms"])
    ratios.sort()
    print(
        f"\nCPU, one thread a rank, {args.tokens} tokens: two ranks are {statistics.median(ratios):.2f} times as fast as one "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f} in {args.rounds} rounds), with the same logits"
    )


if __name__ == "__main__":
    main()
