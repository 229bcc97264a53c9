#!/usr/bin/env python3
"""Rings of nodes that one machine stands for: what they cost, what rounds and reading ahead gain, and what plans predict.

    docs/benchmarks/rings.py BIN WHAT [--rounds 3] [--tokens 12] [--answers 3] [--beds NAME...]

BIN is a folder with builds of both programs; WHAT is one or more of: rounds, splits, predictions, pressure, processes. The model
is a random Qwen3 of 32 layers, 3.6 GiB, and in two beds of the predictions one with experts, 2.4 GiB. Of each ring it says what its
members read from their disks. Needs root, 16 GiB of memory and control groups of version 1 (testbed.py). Nothing else should run.
"""

import argparse
import array
import contextlib
import copy
import itertools
import json
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading

from testbed import Bed, BedError, Bystander, Disk, Node, complete, drawn_prompt, prompt_of

HERE = pathlib.Path(__file__).resolve().parent
DISK_MIB = 6900
DENSE, MOE = "qwen3-ring", "qwen3-moe-ring"
# Room beside weights and KV where a plan does not tell it: a process, its buffers and a gateway.
FIXED_BYTES = 160 << 20
# What a gateway uses of the memory that its plan sets aside for it.
GATEWAY_BYTES = 24 << 20


def deployment(model, strategy):
    return f"""apiVersion: hearth.dev/v1alpha1
kind: InferenceDeployment
metadata: {{name: model}}
spec:
  model: {{source: {{hostPath: {{path: {model}}}}}, contextLength: 2048}}
  strategy: {strategy}
  prefill: {{mode: Chunked}}
  decode: {{maxBatch: 2, kvCache: {{memory: 128Mi}}}}
"""


class Bench:
    def __init__(self, args, folder, disk):
        self.args, self.folder, self.disk = args, pathlib.Path(folder), disk
        self.hearth, self.worker = (str(pathlib.Path(args.bin) / name) for name in ("hearth", "hearth-worker"))
        self.file = self.folder / "deployment.yaml"
        self.use(DENSE)

    def use(self, config, by_token=False):
        """Makes this the model of what follows; `by_token`: each token chooses experts of its own."""
        self.by_token = by_token
        name = config + by_token * "-by-token"
        self.config = json.loads((HERE / f"configs/{config}.json").read_text())
        # Requests name the folder.
        self.model = self.disk / name / "model"
        if not self.model.exists():
            for other in self.disk.iterdir():  # there is room for the dense one and another
                if other.name not in (DENSE, "lost+found"):
                    shutil.rmtree(other)
            make = [self.worker, "random", "--config", str(HERE / f"configs/{config}.json"), "--dtype", "bf16", "--out", str(self.model)]
            subprocess.run(make, check=True, capture_output=True)
            if by_token:
                choose_by_token(self.model)
            for file in (HERE / "../../models/hearth-demo").glob("tokenizer*"):
                shutil.copy(file, self.model)

    def bed(self, nodes):
        bed = Bed(nodes, self.model)
        # All ranks of a node share its limit, and what a gateway's Pod may have beyond its use would be the experts' page cache.
        bed.gateway_bytes = GATEWAY_BYTES if self.by_token else None
        return bed

    def plan(self, profiles, strategy="PipedRing"):
        self.file.write_text(deployment(self.model, strategy))
        file = self.folder / "profiles.yaml"
        file.write_text("---\n".join(json.dumps(profile) + "\n" for profile in profiles))
        command = [self.hearth, "plan", "-f", str(self.file), "--profiles", str(file), "-o", "json"]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)

    def prompt(self, endpoint, tokens, seed):
        """A prompt of so many tokens that shares no prefix with those of other seeds."""
        return drawn_prompt(tokens, self.config["vocab_size"], seed) if self.by_token else prompt_of(endpoint, tokens, seed)

    def serve(self, bed, plan, prompt_tokens=16):
        """Medians of milliseconds to the first token and between tokens, and the text, of a ring that starts cold. Prints what its
        members read."""
        bed.forget()
        endpoint = bed.start(self.worker, copy.deepcopy(plan), self.folder)
        try:
            complete(endpoint, "a b c d", 3)
            seeds = range(1, 1 + self.args.answers)
            prompts = [self.prompt(endpoint, prompt_tokens, seed) for seed in seeds]
            answers, reads = [], []
            for prompt, seed in zip(prompts, seeds):
                read = [bed.read_bytes()]
                answers.append(complete(endpoint, prompt, self.args.tokens, seed, lambda: read.append(bed.read_bytes())))
                reads.append(read)
        finally:
            bed.stop()
        say_reads(plan, self.config, reads, self.args.tokens)
        return [statistics.median(answer[n] for answer in answers) for n in (0, 1)] + [answers[0][2]]


def choose_by_token(model):
    """Makes a random model's embedding 64 times as large, so that each token chooses experts of its own, as plans count on. As it is
    drawn, attention adds far more to a row than its token does, and all tokens behind a prompt choose those that the prompt chose."""
    for path in model.glob("*.safetensors"):
        with open(path, "r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            tensor = json.loads(file.read(length)).get("model.embed_tokens.weight")
            if tensor is None:
                continue
            begin, end = tensor["data_offsets"]
            file.seek(8 + length + begin)
            values = array.array("H", file.read(end - begin))
            for n, bits in enumerate(values):  # bf16: six more in the exponent, but for zeros and the smallest
                if bits & 0x7F80:
                    values[n] = bits + (6 << 7)
            file.seek(8 + length + begin)
            file.write(values.tobytes())


def say_reads(plan, config, reads, tokens):
    """What members have read from their disks, by what each node had read when an answer began and with each of its pieces."""
    for rank in members(plan):
        prompts, alls, halves = [], [], []
        for answer in reads:
            before, *at = [of[rank["node"]] for of in answer]
            middle, last = (len(at) - 1) // 2, len(at) - 1
            prompts.append(at[0] - before)
            alls.append((at[last] - at[0]) / (tokens - 1))
            # Several tokens may come as one piece.
            halves.append((at[last] - at[middle]) / (last - middle) * last / (tokens - 1))
        prompt, all_, half = (statistics.median(of) / 1e6 for of in (prompts, alls, halves))
        print(f"# {rank['node']} read {prompt:.0f} MB until the first token, {all_:.1f} a token behind it, {half:.1f} in the second half")
    if "num_experts" in config:
        share = config["num_experts_per_tok"] / config["num_experts"]
        without_room = [rank["residency"]["weightBytes"] - rank["residency"]["budgetBytes"] for rank in members(plan)]
        print(f"# by the plan: {sum(without_room) / 1e6 * share:.0f} MB a token")


def members(plan):
    return sorted((rank for rank in plan["ranks"] if rank.get("ring")), key=lambda rank: rank["ring"]["place"])


def layers(rank):
    return sum(window["layers"] for window in rank["ring"]["windows"])


def rounds(plan):
    return max(len(rank["ring"]["windows"]) for rank in members(plan))


def with_windows(plan, windows, profiles):
    """The same ring with other windows: a list of (place, layers) in the order of computation. What does not fit is read from disk."""
    base, plan = plan, copy.deepcopy(plan)
    ring = members(plan)
    layer_bytes = ring[1]["residency"]["weightBytes"] // layers(ring[1])
    ends_bytes = ring[0]["residency"]["weightBytes"] - layer_bytes * layers(ring[0])
    kv_bytes = ring[1]["kv"]["memoryBytes"] // layers(ring[1])
    for rank in ring:
        rank["ring"]["windows"] = []
    first = 0
    for place, count in windows:
        ring[place]["ring"]["windows"].append({"firstLayer": first, "layers": count})
        first += count
    room = {profile["node"]: profile["memory"]["availableBytes"] - FIXED_BYTES for profile in profiles}
    for rank in members(base):  # what the planner gives where it is short
        if rank["residency"]["policy"] == "MmapPrefetch":
            room[rank["node"]] = rank["residency"]["budgetBytes"] + rank["kv"]["memoryBytes"]
    for place, rank in enumerate(ring):
        own, residency = layers(rank), rank["residency"]
        residency["weightBytes"] = layer_bytes * own + (ends_bytes if place == 0 else 0)
        rank["kv"]["memoryBytes"] = kv_bytes * own
        budget = room[rank["node"]] - kv_bytes * own
        fits = residency["weightBytes"] <= budget
        residency["budgetBytes"] = residency["weightBytes"] if fits else budget
        residency["policy"] = "Resident" if fits else "MmapPrefetch"
        residency.pop("readAheadBytes", None)
    return plan


def in_one_round(plan, profiles):
    """The same layers in one round, with as many bytes to read ahead as the plan gives."""
    one = with_windows(plan, [(place, layers(rank)) for place, rank in enumerate(members(plan))], profiles)
    for rank, planned in zip(members(one), members(plan)):
        ahead = planned["residency"].get("readAheadBytes")
        if ahead is not None and rank["residency"]["policy"] == "MmapPrefetch":
            rank["residency"]["readAheadBytes"] = ahead
    return one


def without_reading_ahead(plan):
    plan = copy.deepcopy(plan)
    for rank in members(plan):
        if rank["residency"]["policy"] == "MmapPrefetch":
            rank["residency"]["readAheadBytes"] = 0
    return plan


def shared_by(plan, profiles, weights):
    """The layers in one round, shared by weights of the members in their order."""
    total, left = sum(layers(rank) for rank in members(plan)), sum(weights)
    windows = []
    for place, weight in enumerate(weights):
        count = max(1, round(total * weight / left)) if place + 1 < len(weights) else total
        windows.append((place, count))
        total, left = total - count, left - weight
    return with_windows(plan, windows, profiles)


def say(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def ratios(bench, bed, plans):
    """Milliseconds a token of each plan, by name: medians of rounds in which each has its turn."""
    took, texts = {name: [] for name in plans}, set()
    for _ in range(bench.args.rounds):
        for name, plan in plans.items():
            _, tpot_ms, text = bench.serve(bed, plan)
            took[name].append(tpot_ms)
            print(f"# {name}: {tpot_ms:.0f} ms", flush=True)
            texts.add(text)
    if len(texts) != 1:
        raise SystemExit("two rings gave two answers")
    return took


def table(took, of):
    say("ring", "a token, ms", f"of {of}")
    say("---", "---", "---")
    for name, times in took.items():
        each = [a / b for a, b in zip(times, took[of])]
        say(name, f"{statistics.median(times):.0f}", f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")


def show(plan):
    for rank in members(plan):
        residency = rank["residency"]
        windows = " ".join(f"{w['firstLayer']}+{w['layers']}" for w in rank["ring"]["windows"])
        sizes = [residency[name] >> 20 for name in ("weightBytes", "budgetBytes")]
        ahead = f"{residency['readAheadBytes'] >> 20} MiB" if "readAheadBytes" in residency else "two modules"
        ahead = f", {ahead} to read ahead" if residency["policy"] == "MmapPrefetch" else ""
        print(f"# {rank['node']}: {windows}; {sizes[1]} of {sizes[0]} MiB{ahead}")
    print(f"# predicted: {plan['predicted']['tpotMs']} ms a token, {plan['predicted']['ttftMs']} ms to the first")


SHORT = [Node(name, memory_mib=mib, disk_mbps=500, link_mbit=1000) for name, mib in [("attic", 1100), ("cellar", 1000), ("office", 1000), ("den", 1000)]]


def rounds_and_reading_ahead(bench):
    for nodes in [BEDS[name] for name in bench.args.beds or [] if name in BEDS] or [SHORT]:
        compare_rounds(bench, nodes)


def compare_rounds(bench, nodes):
    with bench.bed(nodes) as bed:
        profiles = bed.profiles(bench.worker)
        plan = bench.plan(profiles)
        show(plan)
        plans = {f"k = {rounds(plan)}": plan, "k = 1": in_one_round(plan, profiles), "nothing read ahead": without_reading_ahead(plan)}
        show(plans["k = 1"])
        table(ratios(bench, bed, plans), next(iter(plans)))


MIXED = [
    Node("server", memory_mib=1700, disk_mbps=100, link_mbit=1000),
    Node("desktop", memory_mib=1300, disk_mbps=1000, link_mbit=1000),
    Node("laptop", memory_mib=700, disk_mbps=200, link_mbit=300),
]


def splits(bench):
    with bench.bed(MIXED) as bed:
        profiles = bed.profiles(bench.worker)
        plan = bench.plan(profiles)
        show(plan)
        memory = {profile["node"]: profile["memory"]["availableBytes"] for profile in profiles}
        ring = members(plan)
        plans = {"Halda": plan}
        if len(ring) == len(MIXED):
            plans["equal"] = shared_by(plan, profiles, [1] * len(ring))
            plans["by memory"] = shared_by(plan, profiles, [memory[rank["node"]] for rank in ring])
        for name in list(plans)[1:]:
            show(plans[name])
        table(ratios(bench, bed, plans), "Halda")


class Highest(contextlib.AbstractContextManager):
    """The most memory of each node that the kernel could not reclaim meanwhile, looked at 20 times a second."""

    def __init__(self, nodes):
        self.bytes = {node.name: 0 for node in nodes}
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._look, args=(nodes,))
        self.thread.start()

    def _look(self, nodes):
        while not self.is_over.wait(0.05):
            for node in nodes:
                self.bytes[node.name] = max(self.bytes[node.name], node.unreclaimable_bytes())

    def __exit__(self, *_):
        self.is_over.set()
        self.thread.join()


BYSTANDER_BYTES = 48 << 20
# Prompts that leave room in the KV cache, and such as fill most of it.
PRESSURE_PROMPT_TOKENS = 64, 512


def pressure(bench):
    """What a ring takes from the other processes of its nodes: memory that the kernel cannot reclaim (prima.cpp, section 4.3), and
    pages of files that nobody has read since."""
    say("weights", "tokens of each prompt", "node", "memory taken", "at most", "pages of others still in memory")
    say(*["---"] * 6)
    for kind in bench.args.pressed or PRESSED:
        nodes, config = PRESSED[kind]
        bench.use(config, by_token=config == MOE)
        with bench.bed(nodes) as bed:
            bed.beside_bytes = BYSTANDER_BYTES
            plan = bench.plan(bed.profiles(bench.worker))
            show(plan)
            mapped = copy.deepcopy(plan)
            for rank in members(mapped):  # for the kernel to keep what it likes
                rank["residency"]["policy"] = "Resident"
                rank["residency"].pop("readAheadBytes", None)
            cases = itertools.product({"the plan's": plan, "mapped alone": mapped}.items(), PRESSURE_PROMPT_TOKENS)
            for (name, plan), prompt_tokens in cases:
                press(bench, bed, plan, (f"{kind}, {name}", prompt_tokens))


def press(bench, bed, plan, case):
    """Measures one plan of a bed; `case`: its name and the tokens of each prompt."""
    bed.forget()
    prompt_tokens = case[1]
    with contextlib.ExitStack() as stack:
        bystanders = [stack.enter_context(Bystander(node, bench.model.parent, BYSTANDER_BYTES)) for node in bed.nodes]
        before = {node.name: node.unreclaimable_bytes() for node in bed.nodes}
        with Highest(bed.nodes) as highest:
            endpoint = bed.start(bench.worker, copy.deepcopy(plan), bench.folder)
            for seed in range(bench.args.answers):
                complete(endpoint, bench.prompt(endpoint, prompt_tokens, seed), bench.args.tokens, seed)
        for node, bystander in zip(bed.nodes, bystanders):
            taken = [bytes - before[node.name] for bytes in (node.unreclaimable_bytes(), highest.bytes[node.name])]
            taken = [f"{bytes / 2**20:.0f} MiB, {bytes / (node.memory_mib << 20):.1%}" for bytes in taken]
            say(*case, node.name, *taken, f"{bystander.resident():.0%}")
        bed.stop()


def processes(bench):
    """Two stages in two processes against one process, each on the same two CPUs, over a link that nothing shapes."""
    with bench.bed([Node("attic"), Node("cellar")]) as bed:
        profiles = bed.profiles(bench.worker)
        one = bench.plan(profiles[:1], "Hybrid")
        for profile in profiles:  # so that none holds the model
            profile["memory"]["availableBytes"] = 2400 << 20
        ring = bench.plan(profiles)
        show(ring)
        table(ratios(bench, bed, {"one process": one, "two processes": ring}), "one process")


def two(one, other, link_mbit=1000):
    """Nodes with a CPU each, of (MiB of memory, MB/s of disk)."""
    return [Node("attic", *one, link_mbit, "0"), Node("cellar", *other, link_mbit, "1")]


BEDS = {
    "two alike": two((2400, 500), (2400, 500)),
    "a slow link": two((2400, 500), (2400, 500), 50),
    "unequal memory": two((3000, 500), (1700, 500)),
    "one short": two((2400, 500), (1500, 800)),
    "two short": two((1900, 800), (1800, 800)),
    "unequal disks": two((1900, 1000), (1900, 400)),
    "slow disks": two((1900, 300), (1900, 300)),
    "very short": two((1500, 1000), (1400, 1000), 300),
    "three": [Node("attic", 1900, 500, 1000, "0"), Node("cellar", 1600, 500, 1000, "1"), Node("office", 1500, 500, 1000, "1")],
    "three short": [Node("attic", 1400, 600, 1000, "0"), Node("cellar", 1300, 600, 1000, "1"), Node("office", 1300, 600, 1000, "1")],
    "four short": [Node(node.name, node.memory_mib, 500, 1000, cpu) for node, cpu in zip(SHORT, "0011")],
}
# MB/s, more than the disk has. After a pause, a control group's limit lets tens of MB pass at once, which is more than the
# experts of a token: they would come faster than from the disk that profiles measure.
UNLIMITED = 100_000
# Beds whose model has experts: all of them have room, and not all.
MOE_BEDS = {
    "experts": two((1900, 500), (1700, 500)),
    "short of experts": two((1500, UNLIMITED), (1300, UNLIMITED)),
}
# Rings whose nodes have no room for all of their weights.
PRESSED = {"dense": (SHORT, DENSE), "experts": (two((1500, 800), (1300, 800)), MOE)}
# Of these, beds that must not keep what a prompt's tokens have chosen: each token chooses experts of its own.
BY_TOKEN = ["short of experts"]
CPUS = 2


# Shares of what was measured by which predictions may be off, at most.
GOAL = 0.25
PREDICTED = (("a token", "tpotMs"), ("first token", "ttftMs"))


def off(pair):
    """The share of what was measured by which a prediction is off."""
    predicted, measured = pair
    return abs(predicted / measured - 1)


def prediction(bench, nodes):
    """A plan and, of each thing that it predicts, milliseconds predicted and measured."""
    with bench.bed(nodes) as bed:
        profiles = bed.profiles(bench.worker)
        rates = ", ".join(f"{it['node']} {it['memory']['readAllThreadsGbps']:.1f}" for it in profiles)
        print(f"# GB/s of memory: {rates}")
        plan = bench.plan(profiles)
        show(plan)
        ttft_ms, tpot_ms, _ = bench.serve(bed, plan, plan["predicted"]["ttftPromptTokens"])
    measured = {"tpotMs": tpot_ms}
    if len(nodes) <= CPUS:  # which must compute at the same time
        measured["ttftMs"] = ttft_ms
    taken = {name: (plan["predicted"][key], measured[key]) for name, key in PREDICTED if key in measured}
    print("# " + "; ".join(f"{name}: {a:.0f} of {b:.0f} ms" for name, (a, b) in taken.items()), flush=True)
    return plan, taken


def predictions(bench):
    """Where a prediction is off by more than the goal, the machine may have been: that bed is measured twice more, each time with new
    profiles and a new plan, and the median of the three counts. Beds of more nodes than CPUs are shown and do not count: their
    nodes, and the disk, which is memory that the kernel copies, take time from each other that no profile knows of."""
    say("nodes", "k", *(cell for name, _ in PREDICTED for cell in (f"{name}: predicted, ms", "measured", "ratio")))
    say(*["---"] * 8)
    apart, failed = [], []
    for name in bench.args.beds or [*BEDS, *MOE_BEDS]:
        nodes = (BEDS | MOE_BEDS)[name]
        counts = len(nodes) <= CPUS
        try:
            bench.use(MOE if name in MOE_BEDS else DENSE, name in BY_TOKEN)
            taken = [prediction(bench, nodes)]
            if counts and any(off(pair) > GOAL for pair in taken[0][1].values()):
                taken += [prediction(bench, nodes) for _ in range(2)]
        except (BedError, OSError, subprocess.CalledProcessError) as error:  # the others may do
            failed.append(name)
            print(f"# {name}: {error}\n{getattr(error, 'stderr', None) or ''}", flush=True)
            continue
        cells = []
        for what, _ in PREDICTED:
            pairs = sorted((of[what] for _, of in taken if what in of), key=lambda pair: pair[0] / pair[1])
            if not pairs:
                cells += ["–"] * 3
                continue
            predicted, ms = pairs[len(pairs) // 2]
            apart += [off((predicted, ms))] * counts
            others = f" ({', '.join(f'{a / b:.2f}' for a, b in pairs)})" if len(pairs) > 1 else ""
            cells += [f"{predicted:.0f}", f"{ms:.0f}", f"{predicted / ms:.2f}{others}"]
        plan = taken[0][0]
        say(f"{name} ({len(members(plan))} in the ring)", rounds(plan), *cells)
    if apart:
        print(f"\nOff by {statistics.median(apart):.0%} in the median, at most {max(apart):.0%}.")
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bin")
    what = {"rounds": rounds_and_reading_ahead, "splits": splits, "predictions": predictions}
    what |= {"pressure": pressure, "processes": processes}
    parser.add_argument("what", nargs="+", choices=what)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--answers", type=int, default=3, help="answers of each ring, of which the median counts")
    beds = [*BEDS, *MOE_BEDS]
    parser.add_argument("--beds", nargs="+", choices=beds, help="of the predictions (default: all) and, but for those with experts, of the rounds")
    parser.add_argument("--pressed", nargs="+", choices=PRESSED, help="models of the pressure (default: both)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before it was done"))  # and leaves nothing behind
    with tempfile.TemporaryDirectory(prefix="hearth-rings.", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        with Disk(folder, DISK_MIB) as disk:
            bench = Bench(args, folder, disk.path)
            for name in args.what:
                bench.use(DENSE)
                what[name](bench)


if __name__ == "__main__":
    main()
