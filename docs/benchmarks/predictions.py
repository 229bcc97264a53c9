#!/usr/bin/env python3
"""Measures steps and prompts on modelled devices, for the planner's predictions to be compared with.

    docs/benchmarks/predictions.py WORKER DIR [--out operator/planner/tests/measured.json]

WORKER is a hearth-worker; DIR receives two random checkpoints (0.5 GB), which later runs use again. For each device and
host, rates are measured as a profile measures them; the planner's test sees these and never the flags. Runs with more than
1 % late operations are repeated, and left out if none is better. Python's standard library is all it needs.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
SMALL, DEEP = "deepseek-v3-small", "qwen3-moe-256"
HOST = "virtual:memory=4Gi,mode=modelled,copy=100TB/s,launch=0,"


def streamed():
    """Prompts through a ring: balances of copies and computation, rings, lengths, and links."""
    for compute in ("0.5TFLOPS", "1.25TFLOPS", "4TFLOPS"):
        for ring in (64, 8, 2):
            yield dict(copy="1GB/s", compute=compute, ring=ring, tokens=2048)
    for tokens in (64, 256, 4096, 8192):
        yield dict(copy="1GB/s", compute="2TFLOPS", ring=64, tokens=tokens)
    for copy in ("300MB/s", "4GB/s"):
        yield dict(copy=copy, compute="2TFLOPS", ring=16, tokens=2048)
    yield dict(copy="4GB/s", compute="4TFLOPS", launch="50us", ring=64, tokens=1024)
    yield dict(copy="4GB/s", compute="4TFLOPS", read="20GB/s", ring=64, tokens=1024)
    # Latents whose heads are expanded.
    for compute in ("0.5TFLOPS", "4TFLOPS"):
        for tokens in (512, 2048, 8192):
            yield dict(copy="1GB/s", compute=compute, ring=64, tokens=tokens, expanded=True)
    # Dense modules with them.
    for compute in ("0.5TFLOPS", "1.25TFLOPS", "4TFLOPS"):
        for ring in (64, 8):
            yield dict(copy="1GB/s", compute=compute, ring=ring, tokens=2048, streams_dense=True)


def chunked():
    """Prompts in chunks whose experts are on the host."""
    for chunk in (64, 256):
        for compute in ("100GFLOPS", "400GFLOPS"):
            yield dict(copy="1GB/s", compute="2TFLOPS", host=f"read=20GB/s,compute={compute}", tokens=512, chunk=chunk)


def decoded():
    """Steps: streams, halves, hosts, devices, caches."""
    device = dict(copy="1GB/s", compute="10TFLOPS")
    for model, host in ((SMALL, "read=10GB/s,compute=1TFLOPS"), (DEEP, "read=1GB/s,compute=1TFLOPS")):
        for batch in (1, 2, 3, 4, 6):
            for dual in (False, True)[: 1 + (batch > 1)]:
                yield dict(device, model=model, host=host, batch=batch, dual=dual)
    for host in ("read=2GB/s,compute=1TFLOPS", "read=50GB/s,compute=1TFLOPS", "read=50GB/s,compute=20GFLOPS"):
        yield dict(device, host=host, batch=1)
        yield dict(device, host=host, batch=4, dual=True)
    slow = dict(device, read="5GB/s", host="read=10GB/s,compute=1TFLOPS")
    yield dict(slow, batch=1)
    yield dict(slow, batch=4, dual=True)
    yield dict(slow, batch=1, context=4096)
    for copy in ("500MB/s", "20GB/s"):
        for batch in (1, 4):
            yield dict(device, copy=copy, host="read=4GB/s,compute=1TFLOPS", batch=batch, cache=96)
    for batch in (1, 4):
        yield dict(device, batch=batch)


def options(cell):
    """Arguments of a cell, and how many tokens its sequences have in the middle of the run."""
    rates = ",".join(f"{name}={cell[name]}" for name in ("copy", "compute", "launch") if name in cell)
    device = f"virtual:memory=4Gi,mode=modelled,read={cell.get('read', '500GB/s')},{rates}"
    words = ["--device", device]
    if "host" in cell:
        words += ["--residency", "host-experts", "--host", HOST + cell["host"]]
    if cell.get("cache"):
        words += ["--cache-slots", str(cell["cache"])]
    if cell.get("dual"):
        words += ["--dual-batch"]
    if "ring" in cell:
        words += ["--residency", "stream-loading", "--ring-slots", str(cell["ring"])]
        words += ["--stream-dense"] if cell.get("streams_dense") else []
        words += ["--mla-form", "expanded"] if cell.get("expanded") else []
    if "tokens" in cell:
        return words + ["--prefill", str(cell["tokens"]), "--chunk", str(cell.get("chunk", cell["tokens"])), "--decode", "1"]
    steps = 120 if cell.get("cache") else 10
    prompt = cell.get("context", 64)
    return words + ["--prefill", str(prompt), "--batch", str(cell["batch"]), "--decode", str(steps)]


def measured(report, cell):
    """Milliseconds of the prompt or of a step, and whether the run is void."""
    phase = "prefill" if "tokens" in cell else "decode"
    lanes = [report.get(name) for name in (f"{phase}_lanes", f"{phase}_host_lanes")]
    is_void = any(lane["is_void"] for lane in lanes if lane)
    # The first half of the steps fills a cache.
    steps = report["decode_steps_ms"]
    took = report["prefill_ms"] if phase == "prefill" else statistics.mean(steps[len(steps) // 2 :])
    return took, is_void


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker")
    parser.add_argument("directory")
    parser.add_argument("--out", default="operator/planner/tests/measured.json")
    parser.add_argument("--stretch", type=float, default=10, help="of prompts; of steps four times that, with a cache ten times: threads of the host wait for each other there")
    parser.add_argument("--tries", type=int, default=4)
    parser.add_argument("--more", action="store_true", help="measure only cells that FILE of --out does not have, and add them")
    args = parser.parse_args()
    facts, rates, cells, left_out = {}, {}, [], 0
    if args.more:
        kept = json.loads(Path(args.out).read_text())
        rates, cells = kept["rates"], kept["cells"]
    for model in (SMALL, DEEP):
        path = Path(args.directory) / model
        if not (path / "config.json").exists():
            command = [args.worker, "random", "--config", CONFIGS / f"{model}.json", "--dtype", "fp8", "--out", path]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        command = [args.worker, "facts", "--json", "--model", path]
        facts[model] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for cell in [*streamed(), *chunked(), *decoded()]:
        model = cell.setdefault("model", SMALL)
        words = options(cell)
        key = f"{words[1]} {cell.get('host', '')}"
        names = ("ring", "streams_dense", "expanded", "tokens", "chunk", "batch", "context", "dual", "cache")
        of_cell = {"model": model, "rates": key, **{name: cell[name] for name in names if name in cell}}
        if any({**known, "measured_ms": 0} == {**of_cell, "measured_ms": 0} for known in cells):
            continue
        stretch = f",stretch={args.stretch * (1 if 'tokens' in cell else 10 if 'cache' in cell else 4)}"
        words[1] += stretch
        if "--host" in words:
            words[words.index("--host") + 1] += stretch
        command = [args.worker, "bench", "--model", Path(args.directory) / model, *words, "--json"]
        for _ in range(args.tries):
            more = [] if key in rates else ["--rates"]
            report = json.loads(subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout)
            names = ("copyGbps", "copyBesideReadsGbps", "readGbps", "bf16Gflops", "operationUs", "exchangeUs")
            of = {place: report.get(f"{place}_rates") for place in ("device", "host")}
            rates.setdefault(key, {place: {name: profile.get(name, 0) for name in names} for place, profile in of.items() if profile})
            took_ms, is_void = measured(report, cell)
            if not is_void:
                break
        print(f"{took_ms:10.3f} ms {'(void) ' if is_void else ''}{cell}", flush=True)
        if is_void:
            left_out += 1
            continue
        cells.append({**of_cell, "measured_ms": round(took_ms, 4)})
    Path(args.out).write_text(json.dumps({"facts": facts, "rates": rates, "cells": cells}, indent=1) + "\n")
    print(f"{len(cells)} cells in {args.out}, {left_out} left out", file=sys.stderr)


if __name__ == "__main__":
    main()
