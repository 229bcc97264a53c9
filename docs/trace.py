#!/usr/bin/env python3
"""Draws a part of a trace that `hearth-worker bench --trace` or `hearth trace` wrote.

    docs/trace.py TRACE.json OUT.svg --from-ms 10 --to-ms 20 --title 'A ring of 8 slots'
    docs/trace.py TRACE.json OUT.svg --process decode-0

Times are counted from the first pass of the trace. Python's standard library is all it needs.
"""

import argparse
import json
import re
import sys
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP = 1200, 90, 20, 64
LANE_HEIGHT, LANE_GAP = 46, 22
# Names of operations and modules, and their colours; the first that matches.
COLOURS = [
    (r"layer \d*[02468] expert \d+", "#3d7ea6"),
    (r"layer \d*[13579] expert \d+", "#7fb3d1"),
    (r"expert \d+", "#d9823b"),
    (r"layer \d*[02468]: rows .*", "#b5651d"),
    (r"layer \d*[13579]: rows .*", "#e0a56d"),
    (r"attention.*|mla_.*|kv_append|rope", "#5b8c5a"),
    (r"linear|embed", "#93b992"),
    (r"route|routing", "#a94d4d"),
    (r"prefill|decode.*|step: .*", "#c9c9c9"),
    (r".*", "#b8a9c9"),
]
LEGEND = [
    ("copy of an expert, even layer", "#3d7ea6"),
    ("odd layer", "#7fb3d1"),
    ("routed expert", "#d9823b"),
    ("experts of an even layer on the CPUs", "#b5651d"),
    ("of an odd layer", "#e0a56d"),
    ("attention", "#5b8c5a"),
    ("other products", "#93b992"),
    ("router", "#a94d4d"),
    ("the rest", "#b8a9c9"),
]


def colour(name):
    return next(value for pattern, value in COLOURS if re.fullmatch(pattern, name))


def of_process(events, process):
    """Events of the process whose name begins so; of the only one without a name."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found = [pid for pid, name in names.items() if name.startswith(process or "")]
    if len(found) != 1:
        sys.exit(f"name one process, --process NAME: the trace has {', '.join(names.values())}")
    return [e for e in events if e["pid"] == found[0]]


def read(path, process):
    """Events by lane, in ms since the first pass, and the lanes in their order."""
    with open(path, encoding="utf-8") as file:
        events = of_process(json.load(file)["traceEvents"], process)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    timed = [e for e in events if "ts" in e]
    if not timed:
        sys.exit(f"{path} has no events: nothing happened while it was recorded")
    passes = [e["ts"] for e in timed if lanes[e["tid"]] == "host"]
    start = min(passes) if passes else min(e["ts"] for e in timed)
    by_lane = {name: [] for _, name in sorted(lanes.items())}
    for e in timed:
        begin = (e["ts"] - start) / 1e3
        by_lane[lanes[e["tid"]]].append((begin, begin + e.get("dur", 0) / 1e3, e["name"]))
    if "copy" in by_lane:
        by_lane["copy"] = joined(by_lane["copy"])
    return by_lane


def joined(copies):
    """One event for the matrices of a module that were copied one after the other."""
    out = []
    for begin, end, name in sorted(copies):
        if out and out[-1][2] == name and begin - out[-1][1] < 1e-3:
            out[-1] = (out[-1][0], end, name)
        else:
            out.append((begin, end, name))
    return out


def text(x, y, words, size=13, anchor="start", fill="#222"):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{fill}">{escape(words)}</text>'
    )


def bar(at, y, begin, end, name):
    x, width = at(begin), max(at(end) - at(begin), 0.4)
    # A light edge tells neighbours apart where there is room for it.
    edge = ' stroke="#fff" stroke-width="0.6"' if width > 3 else ""
    rect = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE_HEIGHT}" '
        f'fill="{colour(name)}"{edge}><title>{escape(name)}</title></rect>'
    )
    label = name.split()[-1] if " expert " in f" {name}" else name.split(":")[0]
    if width < 7 * len(label) + 6:
        return rect
    return rect + text(x + width / 2, y + LANE_HEIGHT / 2 + 5, label, 12, "middle", "#fff")


def tick(at, y, when, name):
    """ON events point up, OFF events down."""
    x, is_on = at(when), name.endswith(" ON")
    first, last = (y + 4, y + 22) if is_on else (y + 24, y + 42)
    return (
        f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{first}" y2="{last}" stroke="{"#2c6e49" if is_on else "#a94d4d"}" '
        f'stroke-width="1.2"><title>{escape(name)}</title></line>'
    )


def axis(at, begin, end, y):
    step = 10 ** len(str(int((end - begin) / 10))) / 10 or 1
    while (end - begin) / step > 14:
        step *= 2
    parts, now = [], begin
    while now <= end + 1e-9:
        parts.append(
            f'<line x1="{at(now):.1f}" x2="{at(now):.1f}" y1="{TOP - 6}" y2="{y}" stroke="#ddd"/>'
        )
        parts.append(text(at(now), y + 16, f"{now:g} ms", 11, "middle", "#555"))
        now += step
    return parts


def draw(by_lane, begin, end, title):
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)

    def at(ms):
        return LEFT + (min(max(ms, begin), end) - begin) * scale

    bottom = TOP + len(by_lane) * (LANE_HEIGHT + LANE_GAP) - LANE_GAP + 8
    height = bottom + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        text(LEFT, 28, title, 17),
    ]
    parts += axis(at, begin, end, bottom)
    for index, (lane, events) in enumerate(by_lane.items()):
        y = TOP + index * (LANE_HEIGHT + LANE_GAP)
        if lane == "modules":
            parts.append(text(LEFT - 8, y + 18, "ON", 13, "end", "#2c6e49"))
            parts.append(text(LEFT - 8, y + 38, "OFF", 13, "end", "#a94d4d"))
        else:
            parts.append(text(LEFT - 8, y + LANE_HEIGHT / 2 + 5, lane, 13, "end"))
        for first, last, name in events:
            if last < begin or first > end:
                continue
            parts.append(tick(at, y, first, name) if lane == "modules" else bar(at, y, first, last, name))
    x = LEFT
    drawn = "\n".join(parts)
    for words, fill in LEGEND:
        if fill not in drawn:
            continue
        parts.append(f'<rect x="{x}" y="{height - 26}" width="12" height="12" fill="{fill}"/>')
        parts.append(text(x + 17, height - 16, words, 12))
        x += 34 + 6.6 * len(words)
    return "\n".join(parts) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("out")
    parser.add_argument("--process", help="process to draw where the trace has several, such as decode-0")
    parser.add_argument("--from-ms", type=float, default=0.0)
    parser.add_argument("--to-ms", type=float, default=None)
    parser.add_argument("--title", default="Lanes of the device")
    args = parser.parse_args()
    by_lane = read(args.trace, args.process)
    last = max(end for events in by_lane.values() for _, end, _ in events)
    end = last if args.to_ms is None else args.to_ms
    if not args.from_ms < end:
        sys.exit(f"--from-ms {args.from_ms:g} is not before --to-ms {end:g}: the trace ends at {last:.1f} ms")
    with open(args.out, "w", encoding="utf-8") as file:
        file.write(draw(by_lane, args.from_ms, end, args.title))


if __name__ == "__main__":
    main()
