#!/usr/bin/env python3
"""How close `hearth models pull` comes to what the link and the disk can do.

    docs/benchmarks/download.py BIN [--links 1000,2500,0] [--layers 9] [--rounds 3] [--folder /var/tmp]

BIN is a folder with builds of both programs. A server that speaks the hub's protocol is in a network namespace behind a veth, shaped
by tbf in both directions (0: by nothing); it has a random Qwen3 of so many layers, 1 GiB with nine. Each round a plain program reads
the same files from the same server and drops them, writes as many bytes to the same disk and waits for the disk, does both in turn,
and then `hearth models pull` does, which verifies them, too. Needs root, `ip` and `tc`. Nothing else should run.
"""

import argparse
import hashlib
import http.server
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
SPACE, NEAR, FAR = "hearth-hub", "10.79.0.1", "10.79.0.2"
URL = f"http://{FAR}:8080"
REPO, COMMIT = "lab/model", "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """The calls of the hub that a download needs, about the files of a folder."""

    protocol_version = "HTTP/1.1"
    folder = None
    digests = {}

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPO}/revision/"):
            return self.answer(json.dumps({"sha": COMMIT, "siblings": [self.sibling(file) for file in sorted(self.folder.iterdir())]}))
        file = self.folder / path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
        size = file.stat().st_size
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{self.digests[file.name]}"')
        self.send_header("Content-Length", str(size - begin))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {begin}-{size - 1}/{size}")
        self.end_headers()
        self.wfile.flush()
        with open(file, "rb") as source:
            while begin < size:
                begin += os.sendfile(self.connection.fileno(), source.fileno(), begin, size - begin)

    def sibling(self, file):
        size = file.stat().st_size
        return {"rfilename": file.name, "size": size, "lfs": {"sha256": self.digests[file.name], "size": size}}

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def serve(folder):
    Hub.folder = pathlib.Path(folder)
    for file in Hub.folder.iterdir():
        with open(file, "rb") as source:
            Hub.digests[file.name] = hashlib.file_digest(source, "sha256").hexdigest()
    server = http.server.ThreadingHTTPServer((FAR, 8080), Hub)
    print("ready", flush=True)
    server.serve_forever()


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


def link(mbit):
    """A namespace with the server's address, behind a link."""
    run("ip", "netns", "add", SPACE)
    run("ip", "link", "add", "hearth-near", "type", "veth", "peer", "name", "far", "netns", SPACE)
    run("ip", "address", "add", f"{NEAR}/24", "dev", "hearth-near")
    run("ip", "link", "set", "hearth-near", "up")
    inside = ["ip", "netns", "exec", SPACE]
    run(*inside, "ip", "address", "add", f"{FAR}/24", "dev", "far")
    run(*inside, "ip", "link", "set", "far", "up")
    if mbit:
        shape = ["root", "tbf", "rate", f"{mbit}mbit", "burst", f"{max(64, mbit // 4)}kb", "latency", "20ms"]
        run("tc", "qdisc", "add", "dev", "hearth-near", *shape)
        run(*inside, "tc", "qdisc", "add", "dev", "far", *shape)


def unlink():
    subprocess.run(["ip", "netns", "delete", SPACE], capture_output=True)
    subprocess.run(["ip", "link", "delete", "hearth-near"], capture_output=True)


def link_s(names):
    """Seconds in which the files arrive and are dropped."""
    began, buffer = time.monotonic(), bytearray(1 << 20)
    for name in names:
        with urllib.request.urlopen(f"{URL}/{REPO}/resolve/{COMMIT}/{name}") as source:
            while source.readinto(buffer):
                pass
    return time.monotonic() - began


def disk_s(folder, size):
    """Seconds in which so many bytes are on the disk."""
    began, buffer = time.monotonic(), os.urandom(1 << 20)
    with open(folder / "bytes", "wb") as target:
        for begin in range(0, size, len(buffer)):
            target.write(memoryview(buffer)[: size - begin])
        target.flush()
        os.fdatasync(target.fileno())
    return time.monotonic() - began


def plain_s(folder, names):
    """Seconds in which a program that verifies nothing stores the files."""
    began, buffer = time.monotonic(), bytearray(1 << 20)
    for name in names:
        with urllib.request.urlopen(f"{URL}/{REPO}/resolve/{COMMIT}/{name}") as source, open(folder / name, "wb") as target:
            while count := source.readinto(buffer):
                target.write(memoryview(buffer)[:count])
            target.flush()
            os.fdatasync(target.fileno())
    return time.monotonic() - began


def pull_s(args, folder):
    command = [str(pathlib.Path(args.bin) / "hearth"), "models", "pull", REPO]
    environment = os.environ | {"HF_ENDPOINT": URL, "HEARTH_CACHE": str(folder)}
    began = time.monotonic()
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return time.monotonic() - began


def compare(args, folder, model, mbit):
    names = [file.name for file in sorted(model.iterdir())]
    size = sum((model / name).stat().st_size for name in names)
    link(mbit)
    server = ["ip", "netns", "exec", SPACE, sys.executable, __file__, "--serve", str(model)]
    server = subprocess.Popen(server, stdout=subprocess.PIPE, text=True)
    try:
        server.stdout.readline()
        linked, stored, plain, pulled = [], [], [], []
        measures = (
            (linked, lambda to: link_s(names)),
            (stored, lambda to: disk_s(to, size)),
            (plain, lambda to: plain_s(to, names)),
            (pulled, lambda to: pull_s(args, to)),
        )
        for _ in range(args.rounds):
            for times, measure in measures:
                to = folder / "store"
                to.mkdir()
                os.sync()
                times.append(measure(to))
                shutil.rmtree(to)
    finally:
        server.kill()
        server.wait()
        unlink()
    slower = [max(times) for times in zip(linked, stored)]
    rate = f"{size / statistics.median(pulled) / 1e6:.0f}"
    alone = " and ".join(f"{size / statistics.median(times) / 1e6:.0f}" for times in (linked, stored))
    print(f"| {mbit or 'not shaped'} | {rate} | {alone} | {share(slower, pulled)} | {share(plain, pulled)} |", flush=True)


def share(times, pulled):
    """What a download has of another's pace: the median of the rounds, and all of them."""
    ratios = [a / b for a, b in zip(times, pulled)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bin", nargs="?")
    parser.add_argument("--links", default="1000,2500,0", help="Mbit/s to the server")
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="/var/tmp", help="on the disk that is measured")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before it was done"))
    with tempfile.TemporaryDirectory(prefix="hearth-download.", dir=args.folder) as folder:
        folder = pathlib.Path(folder)
        config = json.loads((HERE / "configs/qwen3-ring.json").read_text()) | {"num_hidden_layers": args.layers}
        (folder / "config.json").write_text(json.dumps(config))
        make = [str(pathlib.Path(args.bin) / "hearth-worker"), "random", "--config", str(folder / "config.json"), "--dtype", "bf16"]
        run(*make, "--out", str(folder / "model"))
        for file in (HERE / "../../models/hearth-demo").glob("tokenizer*"):
            shutil.copy(file, folder / "model")
        print("| link, Mbit/s | MB/s | link and disk alone, MB/s | of the slower | of a plain download |\n| --- | --- | --- | --- | --- |", flush=True)
        for mbit in map(int, args.links.split(",")):
            compare(args, folder, folder / "model", mbit)


if __name__ == "__main__":
    main()
