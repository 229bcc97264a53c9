#!/usr/bin/env python3
"""Simulated load of five shapes against fixed pools, an autoscaler of CPU use, and scaling.mode: Auto, alone and through planner and rollout.

Prints the tables of docs/benchmarks.md and draws autoscale.svg beside this file, of a start of 30 s if that is among them. Needs nothing but Python and cargo.

    docs/benchmarks/autoscale.py [--start SECONDS ...] [--seeds COUNT] [--csv FILE]
"""

import argparse
import collections
import math
import pathlib
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
COMMAND = "cargo run --quiet --release -p hearth-controller-core --features testing --example autoscale --".split()
COLOURS = {"Auto": "#0a7d4b", "HPA": "#c2571a"}


def simulate(start_s, seed):
    """Outcomes as shape -> rule -> [(setting, requests, kept, hours)], and courses as (shape, rule) -> points."""
    text = subprocess.run(
        [*COMMAND, str(start_s), str(seed)], cwd=HERE, check=True, capture_output=True, text=True
    ).stdout
    outcomes = collections.defaultdict(lambda: collections.defaultdict(list))
    courses = collections.defaultdict(list)
    for line in text.splitlines():
        kind, shape, rule, *rest = line.split(",")
        if kind == "outcome":
            setting, requests, kept, hours = rest
            outcomes[shape][rule].append((setting, int(requests), int(kept), float(hours)))
        elif kind == "course":
            courses[shape, rule].append(tuple(float(number) for number in rest))
    return outcomes, courses, text


def add(runs):
    """The sums of several seeds, rule by rule and setting by setting."""
    sums = collections.defaultdict(lambda: collections.defaultdict(dict))
    for outcomes in runs:
        for shape, rules in outcomes.items():
            for rule, rows in rules.items():
                for setting, *amounts in rows:
                    before = sums[shape][rule].get(setting, (0, 0, 0.0))
                    sums[shape][rule][setting] = tuple(map(sum, zip(before, amounts)))
    return sums


def share_at(rows, hours):
    """Share of requests that a rule keeps at that many worker-hours: between the two nearest of its settings."""
    curve = sorted((row[2], row[1] / row[0]) for row in rows)
    for (low, below), (high, above) in zip(curve, curve[1:]):
        if low <= hours <= high:
            return below + (above - below) * (hours - low) / max(high - low, 1e-9)
    return curve[0][1] * hours / curve[0][0] if hours < curve[0][0] else curve[-1][1]


def table(sums):
    print("| shape | Auto | through planner and rollout | HPA at 80 % | kept a worker-hour, Auto / HPA | HPA tuned to as many worker-hours | best fixed pool with no more |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    gains, tuned_gains = [], []
    for shape, rules in sums.items():
        requests, kept, hours = rules["Auto"][""]
        _, kept_planned, hours_planned = rules["planned"][""]
        _, kept_hpa, hours_hpa = rules["HPA"]["80"]
        gains.append((kept / hours) / (kept_hpa / hours_hpa))
        tuned = share_at(rules["HPA"].values(), hours)
        tuned_gains.append(kept / requests / tuned)
        fits = [(row[1] / row[0], setting, row[2]) for setting, row in rules["fixed"].items() if row[2] <= hours]
        best, setting, hours_fixed = max(fits)
        print(
            f"| {shape} | {kept / requests:.1%} in {hours:.1f} h | {kept_planned / requests:.1%} in {hours_planned:.1f} h | {kept_hpa / requests:.1%} in {hours_hpa:.1f} h "
            f"| **{gains[-1]:.2f}** | {tuned:.1%}: {tuned_gains[-1]:.2f} | {setting}: {best:.1%} in {hours_fixed:.1f} h |"
        )
    mean = lambda gains: math.exp(sum(map(math.log, gains)) / len(gains))
    print(f"| geometric mean | | | | **{mean(gains):.2f}** | {mean(tuned_gains):.2f} | |")


def draw(courses, path):
    """Workers of both pools together over time, one panel a shape."""
    shapes = list(dict.fromkeys(shape for shape, _ in courses))
    width, height, left = 760, 110, 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {len(shapes) * height + 40}" '
        'font-family="sans-serif" font-size="12" fill="#444">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, shape in enumerate(shapes):
        top, floor = 26 + index * height, 26 + index * height + height - 30
        end_s = max(point[0] for rule in COLOURS for point in courses[shape, rule])
        x = lambda at_s: left + at_s / end_s * (width - left - 20)
        y = lambda workers: floor - workers / 16 * (floor - top)
        lines.append(f'<text x="{left}" y="{top - 6}">{shape}: workers over {end_s / 3600:.1f} hours</text>')
        for workers in (0, 8, 16):
            lines.append(f'<path d="M{left} {y(workers):.1f}H{width - 20}" stroke="#ddd"/>')
            lines.append(f'<text x="{left - 8}" y="{y(workers) + 4:.1f}" text-anchor="end">{workers}</text>')
        for rule, colour in COLOURS.items():
            points = " ".join(f"{x(at):.1f},{y(prefill + decode):.1f}" for at, prefill, decode, _ in courses[shape, rule])
            lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
    foot = len(shapes) * height + 30
    for index, (rule, colour) in enumerate(COLOURS.items()):
        name = {"Auto": "scaling.mode: Auto", "HPA": "HPA on 80 % of the CPUs"}[rule]
        lines.append(f'<text x="{left + index * 200}" y="{foot}" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*lines, "</svg>", ""]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=float, nargs="+", default=[2, 10, 30, 60, 90, 120], help="seconds until a worker is ready")
    parser.add_argument("--seeds", type=int, default=3, help="how many series of requests are added up")
    parser.add_argument("--csv", type=pathlib.Path, help="where the outcomes are kept")
    arguments = parser.parse_args()
    kept = []
    drawn_s = 30 if 30 in arguments.start else arguments.start[0]
    for start_s in arguments.start:
        runs = [simulate(start_s, seed + 1) for seed in range(arguments.seeds)]
        print(f"\nA worker is ready after {start_s:g} s; {arguments.seeds} series:\n")
        table(add(outcomes for outcomes, _, _ in runs))
        for seed, (_, courses, text) in enumerate(runs, 1):
            rows = [line for line in text.splitlines() if line.startswith("outcome,")]
            kept += [f"{start_s:g},{seed},{row.removeprefix('outcome,')}" for row in rows]
            if start_s == drawn_s and seed == 1:
                draw(courses, HERE / "autoscale.svg")
    if arguments.csv:
        head = "start_s,seed,shape,rule,setting,requests,kept,worker_hours"
        arguments.csv.write_text("\n".join([head, *kept, ""]))


if __name__ == "__main__":
    main()
