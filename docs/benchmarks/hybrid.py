#!/usr/bin/env python3
"""Experts on the CPUs beside a modelled device: what dual batches, hot experts and streamed prompts are worth.

    docs/benchmarks/hybrid.py WORKER DIR dual|hybrid|hot|slp|gap|all

WORKER is a hearth-worker; DIR receives two random checkpoints (1.2 GB), which later runs use again. Only ratios within one
run mean something. A run with more than 1 % late operations is repeated, and marked if none was better. `dual` and `hybrid`
model the CPUs as well; in `hot`, `slp` and `gap` they compute, and the device's times are real ones (stretch=1).
Python's standard library is all it needs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
# Microseconds of a layer's attention, and of its experts for one token (hybrid MoE paper, section 3.3.1).
ATTENTION_US, EXPERTS_US = 350.0, 450.0
# A PCIe link's bytes and a GPU's products for each byte that the paper's DRAM reads (section 4.1): 64 GB/s and half of
# 419 TFLOPS beside 1,228 GB/s; and its GPU's memory.
LINK_SHARE, FLOPS_PER_BYTE, GPU_READ_SHARE = 0.05, 170.0, 1.46


class Bench:
    def __init__(self, worker, directory, tries):
        self.worker, self.directory, self.tries = worker, Path(directory), tries

    def model(self, config):
        path = self.directory / config
        if not (path / "config.json").exists():
            command = [self.worker, "random", "--config", str(CONFIGS / f"{config}.json"), "--dtype", "fp8", "--out", str(path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return path

    def command(self, config, device, *options):
        device = "virtual:memory=4Gi,mode=modelled," + device
        return [self.worker, "bench", "--model", str(self.model(config)), "--device", device, "--json", *map(str, options)]

    def run(self, config, device, *options):
        command = self.command(config, device, *options)
        for _ in range(self.tries):
            report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            if not is_void(report):
                break
        return report

    def dram_gbps(self):
        profile = subprocess.run([self.worker, "profile", "--json"], check=True, capture_output=True, text=True)
        memory = json.loads(profile.stdout)["memory"]
        return max(memory["readAllThreadsGbps"], memory["readOneThreadGbps"])


def is_void(report, phases=("prefill", "decode")):
    lanes = [report.get(f"{phase}{of}_lanes") for phase in phases for of in ("", "_host")]
    return any(lane["is_void"] for lane in lanes if lane)


def void(*reports, phases=("prefill", "decode")):
    return " (void)" if any(is_void(report, phases) for report in reports) else ""


def step_ms(report):
    """Modelled ms of a step: the mean, since steps differ by what is chosen."""
    return statistics.mean(report["decode_steps_ms"])


class Modelled:
    """A device and a host that take the given times for a layer's attention, whatever the streams, and for each expert."""

    CONFIG, LAYERS = "qwen3-moe-256", 24

    def __init__(self, bench, stretch, is_by_launch):
        self.bench, self.stretch = bench, stretch
        # Busy times are linear in what is adjusted: the launch of an operation or µs a byte on the device, µs a byte on the host.
        busy = []
        for launch_us, us_per_kb in ((5, 1e-3), (25, 1e-2)):
            self.launch_us = launch_us if is_by_launch else 5
            self.us_per_kb = [1e-3 if is_by_launch else us_per_kb, us_per_kb]
            busy.append(self.busy_us(self.run(1, decode=4)))
        adjusted = [(5, 25) if is_by_launch else (1e-3, 1e-2), (1e-3, 1e-2)]
        found = []
        for lane, target in enumerate((ATTENTION_US, EXPERTS_US)):
            (low, high), (least, most) = adjusted[lane], (busy[0][lane], busy[1][lane])
            found.append(low + (target - least) * (high - low) / (most - least))
        if is_by_launch:
            self.launch_us, self.us_per_kb[1] = found
        else:
            self.us_per_kb = found

    def run(self, batch, *options, decode=12):
        device, host = (f"read={1e9 / each:.0f}B/s,compute=10PFLOPS,stretch={self.stretch}" for each in self.us_per_kb)
        host = f"virtual:memory=4Gi,mode=modelled,copy=100TB/s,launch=0,{host}"
        options = ["--residency", "host-experts", "--host", host, "--prefill", 16, "--batch", batch, *options]
        device = f"copy=50GB/s,launch={self.launch_us:.3f}us,{device}"
        return self.bench.run(self.CONFIG, device, *options, "--decode", decode)

    def busy_us(self, report):
        """Busy µs of a layer of a step: on the device, and on the host."""
        steps = self.LAYERS * report["decode_steps"]
        return [report[lanes]["compute_ms"] * 1e3 / steps for lanes in ("decode_lanes", "decode_host_lanes")]


def dual(bench, args):
    """Throughput of dual batches against one stream, and against the same streams unsplit."""
    modelled = Modelled(bench, args.stretch, is_by_launch=True)
    one = modelled.run(1)
    attention_us, experts_us = modelled.busy_us(one)
    print(f"one stream: attention {attention_us:.0f} µs and experts {experts_us:.0f} µs a layer, step {step_ms(one):.2f} ms{void(one)}\n")
    print("| streams | unsplit, ms | dual batch, ms | against one stream | goal | against unsplit | goal | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for streams, of_one, of_whole in ((2, 1.6, 1.3), (4, 1.7, 1.12), (6, 1.75, 1.05)):
        whole, halves = modelled.run(streams), modelled.run(streams, "--dual-batch")
        gain = step_ms(one) * streams / step_ms(halves)
        print(
            f"| {streams} | {step_ms(whole):.2f} | {step_ms(halves):.2f} | {gain:.2f} | ≥ {of_one} "
            f"| {step_ms(whole) / step_ms(halves):.2f} | ≥ {of_whole} |{void(one, whole, halves)} |",
            flush=True,
        )


def hybrid(bench, args):
    """A step of one stream against attention alone and experts alone."""
    modelled = Modelled(bench, args.stretch, is_by_launch=False)
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        report = modelled.run(1, "--trace", trace, decode=16)
        events = json.loads(trace.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    steps = [event for event in events if event["name"] == "decode step"]
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    crossing = sum(
        event["dur"]
        for event in events
        if event.get("dur") and names[event["tid"]] == "compute" and begin <= event["ts"] < end
        and event["name"] in ("download", "routing", "upload")
    ) / len(steps) / 1e3
    device, host = (busy * modelled.LAYERS / 1e3 for busy in modelled.busy_us(report))
    step = step_ms(report)
    print("| step, ms | attention alone, ms | experts alone, ms | of it the way between, ms | step / (attention + experts) | without the way between | goal | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    print(
        f"| {step:.2f} | {device:.2f} | {host:.2f} | {crossing:.2f} | {step / (device + host):.3f} "
        f"| {step / (device + host - crossing):.3f} | ≤ 1.03 |{void(report)} |",
        flush=True,
    )


# The rows below: CPUs that compute.
REAL = "deepseek-v3-256"


def real_device(dram_gbps, more="stretch=1", link_share=LINK_SHARE):
    """A device and a link in the paper's proportion to this machine's DRAM."""
    rates = (link_share * dram_gbps * 1e9, GPU_READ_SHARE * dram_gbps * 1e9, FLOPS_PER_BYTE * dram_gbps * 1e9)
    copy, read, compute = (f"{rate / 1e6:.0f}" for rate in rates)
    return f"copy={copy}MB/s,read={read}MB/s,compute={compute}MFLOPS,launch=5us,{more}"


def hot(bench, args):
    """A cache of a quarter of the experts on the device beside CPUs that compute the others."""
    dram = bench.dram_gbps()
    experts = 4 * 256
    steps = 400
    print(f"DRAM {dram:.1f} GB/s with all threads; link {LINK_SHARE * dram:.2f} GB/s; {args.threads} threads compute experts\n")
    print("| routing | streams | without, ms | with a cache, ms | without / with | goal | |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for routing, streams, goal in (("zipf:1", 1, "≥ 1.5"), ("zipf:1", 4, "≥ 1"), ("zipf:0.6", 1, "≥ 1"), ("uniform", 1, "≥ 1"), ("uniform", 4, "≥ 1")):
        device = real_device(dram, f"stretch=1,routing={routing}")
        options = ["--residency", "host-experts", "--threads", args.threads, "--prefill", 16, "--batch", streams]
        times, voids = {0: [], experts // 4: []}, []
        for _ in range(args.rounds):
            for slots, of in times.items():
                report = bench.run(REAL, device, *options, "--decode", steps, "--cache-slots", slots)
                # The first half fills the cache.
                of.append(statistics.median(report["decode_steps_ms"][steps // 2 :]))
                voids.append(report)
        without, cached = (statistics.median(of) for of in times.values())
        phases = ("decode",)
        print(
            f"| {routing} | {streams} | {without:.2f} | {cached:.2f} | {without / cached:.2f} | {goal} |{void(*voids, phases=phases)} |",
            flush=True,
        )


def slp(bench, args):
    """A prompt of 8K tokens through a ring, and in chunks with experts on the CPUs."""
    dram = bench.dram_gbps()
    tokens, layers, expert_flops = 8192, 4, 2 * 3 * 512 * 512
    options = ["--prefill", tokens, "--decode", 1]
    chunked = bench.run(REAL, real_device(dram), *options, "--chunk", 512, "--residency", "host-experts", "--threads", args.threads)
    device = real_device(dram, f"stretch={args.stretch}")
    streamed = bench.run(REAL, device, *options, "--chunk", tokens, "--residency", "stream-loading")
    lanes = chunked["prefill_lanes"]
    host_ms = lanes["wall_ms"] - lanes["compute_ms"]
    rate = tokens * 8 * layers * expert_flops / host_ms / 1e6
    phases = ("prefill",)
    print(f"DRAM {dram:.1f} GB/s; link {LINK_SHARE * dram:.2f} GB/s; device {FLOPS_PER_BYTE * dram / 1e3:.2f} TFLOPS; the CPUs computed experts at {rate:.0f} GFLOPS ({args.threads} threads)\n")
    print("| tokens | in chunks of 512, s | streamed, s | of it copies, s | chunks / streamed | goal | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(
        f"| {tokens} | {chunked['prefill_ms'] / 1e3:.2f} | {streamed['prefill_ms'] / 1e3:.2f} "
        f"| {streamed['prefill_lanes']['copy_ms'] / 1e3:.2f} | {chunked['prefill_ms'] / streamed['prefill_ms']:.1f} | ≥ 3 |"
        f"{void(chunked, streamed, phases=phases)} |",
        flush=True,
    )


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def gap(bench, args):
    """Gaps between the tokens of four streams while another process streams a prompt."""
    dram = bench.dram_gbps()
    # The link is idle for some of the time, and is to take its share all the same.
    link_share = 1.2 * LINK_SHARE
    device = real_device(dram, link_share=link_share)
    options = ["--residency", "host-experts", "--threads", 1, "--batch", 4, "--prefill", 16]
    warm = bench.run(REAL, device, *options, "--decode", 50)
    # Alone for as long as beside the prompt, and some more for what a start disturbs.
    seconds = args.seconds
    steps = int(3.5 * seconds * 1e3 / warm["decode_step_ms"])
    decode = subprocess.Popen(bench.command(REAL, device, *options, "--decode", steps), stdout=subprocess.PIPE, text=True)
    time.sleep(1.2 * seconds)
    started_ms = time.time() * 1e3
    pass_s = 4 * 256 * 3 * 512 * 512 / (link_share * dram * 1e9)
    chunk = 512
    prompt = ["--residency", "stream-loading", "--ring-slots", 64, "--prefill", int(seconds / pass_s + 1) * chunk, "--chunk", chunk]
    streams = subprocess.run(bench.command(REAL, device + ",copies=real", *prompt, "--decode", 1), check=True, capture_output=True, text=True)
    output, _ = decode.communicate()
    if decode.returncode != 0:
        sys.exit("the decode process failed")
    prefill, decode = json.loads(streams.stdout), json.loads(output)
    begins_ms = prefill["prefill_began_unix_ms"]
    ends_ms = begins_ms + prefill["prefill_ms"]
    now_ms, alone, beside = decode["decode_began_unix_ms"], [], []
    for took in decode["decode_steps_ms"]:
        middle = now_ms + took / 2
        now_ms += took
        if middle < started_ms:
            alone.append(took)
        elif begins_ms <= middle < ends_ms:
            beside.append(took)
    if not (alone and beside):
        sys.exit("the runs did not overlap: raise --seconds")
    copied = prefill["prefill_lanes"]["copy_ms"] / prefill["prefill_ms"] * link_share
    of = lambda share: (quantile(alone, share), quantile(beside, share))
    (half_alone, half_beside), (p99_alone, p99_beside) = of(0.5), of(0.99)
    slower = statistics.mean(beside) / statistics.mean(alone) - 1
    print(f"DRAM {dram:.1f} GB/s; copies took {100 * copied:.1f} % of it; {len(alone)} steps alone, {len(beside)} beside the prompt\n")
    print("| | alone, ms | while a prompt streams, ms | ratio | goal |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| gap, median | {half_alone:.2f} | {half_beside:.2f} | {half_beside / half_alone:.2f} | |")
    print(f"| gap, p99 | {p99_alone:.2f} | {p99_beside:.2f} | {p99_beside / p99_alone:.2f} | ≤ 1.5 |")
    print(f"| decode's slow-down, mean | {statistics.mean(alone):.2f} | {statistics.mean(beside):.2f} | {100 * slower:.1f} % | < 10 % |")
    prompt_void = void(prefill, phases=("prefill",))
    print(f"\nlate operations: decode {decode['decode_lanes']['late_operations']} of {decode['decode_lanes']['operations']}{void(decode, phases=('decode',))}, prompt {prefill['prefill_lanes']['late_operations']} of {prefill['prefill_lanes']['operations']}{prompt_void}", flush=True)


ROWS = {"dual": dual, "hybrid": hybrid, "hot": hot, "slp": slp, "gap": gap}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker")
    parser.add_argument("directory")
    parser.add_argument("row", choices=[*ROWS, "all"])
    parser.add_argument("--stretch", type=float, default=10, help="of runs in which the CPUs are modelled, too")
    parser.add_argument("--tries", type=int, default=3, help="runs until one is not void")
    parser.add_argument("--threads", type=int, default=2, help="that compute experts")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind of hot")
    parser.add_argument("--seconds", type=float, default=12, help="for which gap streams a prompt")
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    bench = Bench(args.worker, args.directory, args.tries)
    for name, row in ROWS.items():
        if args.row in (name, "all"):
            print(f"### {name}: {row.__doc__}\n", flush=True)
            row(bench, args)
            print()


if __name__ == "__main__":
    main()
