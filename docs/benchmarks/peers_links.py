#!/usr/bin/env python3
"""Two ranks that read prompts together over shaped links: time to the first token by SmallEP and by standard EP, and of one rank.
With --beside, several ranks on each of two nodes: by SmallEP with keys and values from each to each, and passed on.

    docs/benchmarks/peers_links.py BIN MODEL [--links 1000,300,100] [--tokens 1024] [--rounds 5] [--beside 2]

BIN is a folder with builds of both programs, MODEL a checkpoint with experts (`hearth-worker random --config
docs/benchmarks/configs/deepseek-v3-small.json --dtype fp8 --out MODEL`) and with a tokenizer (`cp models/hearth-demo/tokenizer*
MODEL`). Each node is a network namespace with one CPU, for all of its ranks (testbed.py). Needs root and control groups of version 1. Nothing else should run.
"""

import argparse
import copy
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile

from testbed import Bed, Node, complete, prompt_of

DEPLOYMENT = """apiVersion: hearth.dev/v1alpha1
kind: InferenceDeployment
metadata: {{name: model}}
spec:
  model: {{source: {{hostPath: {{path: {model}}}}}, contextLength: 2048, servedName: model}}
  strategy: Hybrid
  decode: {{maxBatch: 2}}
"""


def plan_of(args, bed, folder):
    """A plan whose prefill rank is alone on the first node, as `hearth plan` writes it."""
    worker, hearth = (str(pathlib.Path(args.bin) / name) for name in ("hearth-worker", "hearth"))
    deployment, profiles = folder / "deployment.yaml", folder / "profiles.yaml"
    deployment.write_text(DEPLOYMENT.format(model=args.model.resolve()))
    profiles.write_text(json.dumps(bed.profiles(worker)[0]))
    command = [hearth, "plan", "-f", str(deployment), "--profiles", str(profiles), "-o", "json"]
    plan = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    for rank in plan["ranks"]:
        if rank["role"] == "Prefill":
            rank["chunkTokens"] = args.tokens
    return plan


def of_peers(plan, bed, experts, beside=1, kv="Direct"):
    """The same with so many ranks on each of the two nodes."""
    plan = copy.deepcopy(plan)
    head = next(rank for rank in plan["ranks"] if rank["role"] == "Prefill")
    head["peers"] = {"head": head["name"], "place": 0, "ranks": 2 * beside, "experts": experts}
    for place in range(1, 2 * beside):
        follower = copy.deepcopy(head)
        node = place // beside
        follower |= {"name": f"stage-{place - 1}", "role": "Stage", "node": bed.nodes[node].name, "cpus": [node]}
        follower["peers"]["place"] = place
        plan["ranks"].append(follower)
    head["peers"]["kv"] = kv
    return plan


def plans_of(args, bed, folder):
    """What is compared, by name, and the names of the ratios that are told."""
    plan = plan_of(args, bed, folder)
    if args.beside == 1:
        ways = {"one": plan} | {way: of_peers(plan, bed, way) for way in ("SmallEp", "Ep")}
        return ways, (("Ep", "SmallEp"), ("one", "SmallEp"))
    ways = {kv: of_peers(plan, bed, "SmallEp", args.beside, kv) for kv in ("Direct", "PassedOn")}
    return ways, (("Direct", "PassedOn"),)


def serve(args, bed, plan, folder):
    """Milliseconds to the first token of a prompt, and the text."""
    endpoint = bed.start(str(pathlib.Path(args.bin) / "hearth-worker"), copy.deepcopy(plan), folder)
    try:
        complete(endpoint, prompt_of(endpoint, args.tokens, 0), 4)
        ttft_ms, _, text = complete(endpoint, prompt_of(endpoint, args.tokens, 1), 4)
    finally:
        bed.stop()
    return ttft_ms, text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bin")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--links", default="1000,300,100", help="Mbit/s between the nodes")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", type=int, default=1, help="ranks on each node")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before it was done"))
    columns = {
        False: "one rank, ms | SmallEP, ms | EP, ms | EP of SmallEP | one rank of SmallEP",
        True: "from each to each, ms | passed on, ms | the former of the latter",
    }[args.beside > 1]
    print(f"| link, Mbit/s | {columns} |")
    print("| --- " * (columns.count("|") + 2) + "|", flush=True)
    with tempfile.TemporaryDirectory(prefix="hearth-peers.", dir="/var/tmp") as folder:
        for link in map(int, args.links.split(",")):
            with Bed([Node("attic", 0, 0, link, "0"), Node("cellar", 0, 0, link, "1")], args.model) as bed:
                plans, told = plans_of(args, bed, pathlib.Path(folder))
                took, texts = {name: [] for name in plans}, set()
                for _ in range(args.rounds):
                    for name, plan in plans.items():
                        ttft_ms, text = serve(args, bed, plan, folder)
                        took[name].append(ttft_ms)
                        texts.add(text)
                if len(texts) != 1:
                    raise SystemExit("two ways gave two answers")
            medians = [f"{statistics.median(times):.0f}" for times in took.values()]
            ratios = []
            for of, to in told:
                each = [a / b for a, b in zip(took[of], took[to])]
                ratios.append(f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
            print("| " + " | ".join([str(link), *medians, *ratios]) + " |", flush=True)


if __name__ == "__main__":
    main()
