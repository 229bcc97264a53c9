#!/usr/bin/env python3
"""Decode steps of one program against those of another, in turns on the same models: medians, and the ratio of each pair.

    docs/benchmarks/compare.py BEFORE NOW MODEL... [--rounds 8] [--batches 1,4]

BEFORE and NOW are hearth-workers, such as builds of two commits; MODEL are directories. Python's standard library is all it
needs.
"""

import argparse
import json
import statistics
import subprocess
from pathlib import Path


def step_ms(worker, model, batch):
    command = [worker, "bench", "--model", model, "--prefill", "64", "--batch", str(batch), "--decode", "32", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["decode_step_ms"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("now")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", default="1,4")
    args = parser.parse_args()
    print("| model | batch | before | now | now / before, median (lowest to highest) |\n| --- | --- | --- | --- | --- |")
    for model in args.models:
        for batch in map(int, args.batches.split(",")):
            took = {args.before: [], args.now: []}
            for n in range(args.rounds):
                for worker in (args.before, args.now) if n % 2 else (args.now, args.before):
                    took[worker].append(step_ms(worker, model, batch))
            before, now = took[args.before], took[args.now]
            ratios = [b / a for a, b in zip(before, now)]
            medians = f"{statistics.median(before):.2f} ms | {statistics.median(now):.2f} ms"
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            print(f"| {Path(model).name} | {batch} | {medians} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
