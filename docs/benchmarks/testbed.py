"""Nodes of unequal memory, disks, CPUs and links on one machine, to measure rings on.

A node is a network namespace behind a bridge, its link shaped by tbf in both directions, with control groups (v1) that limit its
memory, the rate of its disk and its CPUs. Needs root, `ip`, `tc`, `nsenter` and Python's standard library. The page cache is the
machine's: a page is counted to the node that read it first, so measurements begin with an empty one. All nodes have one disk, a
file system in memory, which is faster than all of them together may read.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import urllib.request

GROUPS = pathlib.Path("/sys/fs/cgroup")
BRIDGE = "hearth-bed"
NETWORK = "10.77.0"
PORT = 7000
KINDS = ("memory", "blkio", "cpuset")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclasses.dataclass
class Node:
    name: str
    memory_mib: int = 0  # 0: no limit
    disk_mbps: int = 0  # MB/s; 0: no limit
    link_mbit: int = 0  # 0: no limit
    cpus: str = "0-1"

    def command(self, *words):
        """The words of a command that runs on the node."""
        groups = " ".join(str(group / "cgroup.procs") for group in self.groups())
        # Not by `ip netns exec`, which hides the control groups.
        enter = f'for g in {groups}; do echo $$ > $g; done; exec nsenter --net=/run/netns/bed-{self.name} "$@"'
        return ["bash", "-c", enter, "bash", *words]

    def groups(self):
        return [GROUPS / kind / BRIDGE / self.name for kind in KINDS]

    def limit(self, memory_bytes):
        (self.groups()[0] / "memory.limit_in_bytes").write_text(str(memory_bytes))

    def unreclaimable_bytes(self):
        """Memory of its processes that the kernel cannot take back without swapping."""
        group = self.groups()[0]
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        kernel = int((group / "memory.kmem.usage_in_bytes").read_text())
        return sum(int(stat[name]) for name in ("total_rss", "total_shmem", "total_unevictable")) + kernel


class BedError(Exception):
    """A ring that does not serve on a bed."""


def disk_of(path):
    """The whole device that holds a path, as control groups name it."""
    device = os.stat(path).st_dev
    block = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    block = block.parent if (block / "partition").exists() else block
    return (block / "dev").read_text().strip()


class Disk(contextlib.AbstractContextManager):
    """A file system in memory that behaves like a disk: what is read of it is in the page cache, too."""

    def __init__(self, folder, size_mib):
        self.folder, self.size_mib = pathlib.Path(folder), size_mib
        self.path = self.folder / "disk"

    def __enter__(self):
        memory = self.folder / "memory"
        for folder in (memory, self.path):
            folder.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={self.size_mib + 64}m", "none", str(memory))
        try:
            run("truncate", "-s", f"{self.size_mib}M", str(memory / "blocks"))
            run("mkfs.ext4", "-q", "-m", "0", str(memory / "blocks"))
            run("mount", "-o", "loop", str(memory / "blocks"), str(self.path))
            queue = pathlib.Path("/sys/dev/block") / disk_of(self.path) / "queue/read_ahead_kb"
            queue.write_text("4096")  # as disks have it
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for folder in (self.path, self.folder / "memory"):
            # The loop device lets go of its file a while after it is unmounted, or when mount namespaces made meanwhile end.
            for _ in range(50):
                subprocess.run(["umount", str(folder)], capture_output=True)
                if not folder.is_mount():
                    break
                time.sleep(0.1)
            else:
                subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


class Bed(contextlib.AbstractContextManager):
    """The nodes, for as long as it is open."""

    def __init__(self, nodes, model):
        if not (GROUPS / "memory" / "memory.limit_in_bytes").exists():
            raise SystemExit("this machine has no control groups of version 1, which limit a node's disk and page cache")
        self.nodes, self.model, self.processes = nodes, pathlib.Path(model), []
        self.beside_bytes = 0  # of each node's memory, for others beside ranks
        self.gateway_bytes = None  # of a node's memory, for a gateway, instead of what its Pod may have

    def __enter__(self):
        try:
            self.__exit__()  # what a run that was killed has left
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self):
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "address", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        disk = disk_of(self.model)
        for number, node in enumerate(self.nodes, 1):
            space, inner, outer = f"bed-{node.name}", f"bed{number}i", f"bed{number}o"
            node.address = f"{NETWORK}.{number}"
            run("ip", "netns", "add", space)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
            run("ip", "link", "set", outer, "master", BRIDGE, "up")
            inside = ["ip", "-n", space]
            run(*inside, "address", "add", f"{node.address}/24", "dev", inner)
            for device in (inner, "lo"):
                run(*inside, "link", "set", device, "up")
            if node.link_mbit:
                shape = ["root", "tbf", "rate", f"{node.link_mbit}mbit", "burst", "64kb", "latency", "20ms"]
                run("tc", "qdisc", "add", "dev", outer, *shape)
                run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", inner, *shape)
            for group in node.groups():
                group.mkdir(parents=True, exist_ok=True)
            memory, disks, cpus = node.groups()
            if node.memory_mib:
                node.limit(node.memory_mib << 20)
            if node.disk_mbps:
                (disks / "blkio.throttle.read_bps_device").write_text(f"{disk} {node.disk_mbps * 10**6}")
            for group, list_ in ((cpus.parent, "0-1"), (cpus, node.cpus)):
                (group / "cpuset.mems").write_text("0")
                (group / "cpuset.cpus").write_text(list_)

    def __exit__(self, *_):
        self.stop()
        for number, node in enumerate(self.nodes, 1):
            subprocess.run(["ip", "netns", "delete", f"bed-{node.name}"], capture_output=True)
            subprocess.run(["ip", "link", "delete", f"bed{number}o"], capture_output=True)
            for group in node.groups():
                remove(group)
        for kind in KINDS:
            remove(GROUPS / kind / BRIDGE)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)

    def forget(self):
        """Empties the page cache, so that each node is charged for what it reads."""
        os.sync()
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")

    def read_bytes(self):
        """Bytes that each node has read from its disk so far."""
        disk = f"{disk_of(self.model)} Read "
        read = {}
        for node in self.nodes:
            lines = (node.groups()[1] / "blkio.throttle.io_service_bytes").read_text().splitlines()
            read[node.name] = sum(int(line.removeprefix(disk)) for line in lines if line.startswith(disk))
        return read

    def links(self):
        """GB/s and microseconds there and back between each two nodes, one after the other, by TCP."""
        rates = {}
        for number, one in enumerate(self.nodes):
            for other in self.nodes[number + 1 :]:
                rates[one.name, other.name] = rates[other.name, one.name] = measure_link(one, other)
        return rates

    def profiles(self, worker):
        """What the nodes' agents would have measured."""
        links, profiles = self.links(), []
        for node in self.nodes:
            self.forget()
            measure = [worker, "profile", "--json", "--scope", "process", "--node", node.name, "--disk", str(self.model)]
            profile = json.loads(run(*node.command(*measure)))
            profile["links"] = [
                {"peer": to, "gbps": gbps, "rttUs": rtt_us} for (of, to), (gbps, rtt_us) in links.items() if of == node.name
            ]
            profiles.append(profile)
        self.forget()
        return profiles

    def start(self, worker, plan, folder, options=()):
        """Starts all ranks of a plan and waits until the gateway answers; returns the address of the endpoint. Their nodes then
        have as much memory as the ranks' Pods would: what a plan leaves to others is taken."""
        nodes = {node.name: node for node in self.nodes}
        for number, rank in enumerate(plan["ranks"]):
            rank["endpoint"] = f"{nodes[rank['node']].address}:{PORT + number}"
        for node in self.nodes:
            if node.memory_mib:
                taken = sum(self.memory_of(rank) for rank in plan["ranks"] if rank["node"] == node.name)
                node.limit(taken + self.beside_bytes if taken else node.memory_mib << 20)
        file = pathlib.Path(folder) / "plan.json"
        file.write_text(json.dumps(plan))
        for rank in plan["ranks"]:
            role = rank["role"].lower()
            more = [] if role == "gateway" else list(options)
            command = nodes[rank["node"]].command(worker, role, "--plan", str(file), "--rank", rank["name"], *more)
            log = open(pathlib.Path(folder) / f"{rank['name']}.log", "w")
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            self.processes.append((rank["name"], process))
        gateway = next(rank for rank in plan["ranks"] if rank["role"] == "Gateway")
        self._wait(f"http://{gateway['endpoint']}", folder)
        return gateway["endpoint"]

    def memory_of(self, rank):
        """Bytes that a rank's Pod may have."""
        if rank["role"] == "Gateway" and self.gateway_bytes is not None:
            return self.gateway_bytes
        weights = rank.get("residency", {}).get("budgetBytes", 0)
        return weights + rank.get("kv", {}).get("memoryBytes", 0) + rank.get("scratchBytes", 0)

    def _wait(self, url, folder):
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            for name, process in self.processes:
                if process.poll() is not None:
                    raise BedError(f"{name} ended:\n" + (pathlib.Path(folder) / f"{name}.log").read_text()[-2000:])
            try:
                body = json.dumps({"model": "model", "prompt": "a", "max_tokens": 1}).encode()
                request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=60).read()
                return
            except OSError:
                time.sleep(0.3)
        raise BedError("the ring did not begin to serve in three minutes")

    def stop(self):
        for _, process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes = []


def remove(group):
    """Ends what is left in a control group, and removes it. It may be busy for a while with pages that were charged to it."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            with contextlib.suppress(OSError):
                for process in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                if (group / "memory.force_empty").exists():
                    (group / "memory.force_empty").write_text("0")
            time.sleep(0.2)
    print(f"# {group} is still busy", file=sys.stderr)


class Bystander(contextlib.AbstractContextManager):
    """A process of a node that has read a file once, and does nothing."""

    def __init__(self, node, folder, size):
        self.path = pathlib.Path(folder) / f"{node.name}.file"
        self.path.write_bytes(os.urandom(size))
        os.sync()
        descriptor = os.open(self.path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # or else its pages are counted to this process
        os.close(descriptor)
        command = node.command("python3", "-c", WATCH, str(self.path))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process.stdout.readline()

    def resident(self):
        """The share of its file that is still in memory."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.path.unlink()


WATCH = """
import ctypes, mmap, sys
file = open(sys.argv[1], "r+b")
pages = mmap.mmap(file.fileno(), 0)
for at in range(0, len(pages), 4096):
    pages[at]
libc = ctypes.CDLL(None, use_errno=True)
address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
count = len(pages) // 4096
states = (ctypes.c_ubyte * count)()
print("ready", flush=True)
while sys.stdin.readline():
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(pages)), states):
        sys.exit("mincore failed")
    print(sum(state & 1 for state in states) / count, flush=True)
"""

ECHO = """
import socket, struct, sys
server = socket.create_server((sys.argv[1], 9999))
print("ready", flush=True)
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while head := peer.recv(4, socket.MSG_WAITALL):
    left = struct.unpack("!I", head)[0]
    while left:
        left -= len(peer.recv(min(left, 1 << 20)))
    peer.sendall(b"x")
"""

ASK = """
import json, socket, struct, sys, time
peer = socket.create_connection((sys.argv[1], 9999))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def seconds(size):
    begin = time.perf_counter()
    peer.sendall(struct.pack("!I", size) + bytes(size))
    peer.recv(1)
    return time.perf_counter() - begin
rtt = sorted(seconds(1) for _ in range(51))[25]
size = 1 << 20
while seconds(size) < 0.5 and size < 1 << 28:
    size *= 2
took = min(seconds(size) for _ in range(2))
print(json.dumps([size / (took - rtt) / 1e9, rtt * 1e6]))
"""


def measure_link(one, other):
    server = subprocess.Popen(other.command("python3", "-c", ECHO, other.address), stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    try:
        return tuple(json.loads(run(*one.command("python3", "-c", ASK, other.address))))
    finally:
        server.kill()
        server.wait()


def ask(endpoint, prompt, **more):
    body = {"model": "model", "prompt": prompt, "temperature": 1, "ignore_eos": True, **more}
    request = urllib.request.Request(
        f"http://{endpoint}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=900)


def prompt_of(endpoint, tokens, start):
    """A prompt of about so many tokens that shares no prefix with those of other starts."""
    count = lambda words: json.load(ask(endpoint, f"{start}" + " a" * words, max_tokens=1))["usage"]["prompt_tokens"]
    few, more = count(2), count(10)
    return f"{start}" + " a" * round(2 + (tokens - few) * 8 / (more - few))


def drawn_prompt(tokens, vocab, seed):
    """A prompt of so many tokens, drawn from a seed: different ones, so that they choose different experts."""
    return random.Random(seed).choices(range(10, vocab), k=tokens)


def complete(endpoint, prompt, tokens, seed=1, each=lambda: None):
    """Milliseconds to the first token and between tokens, and the text; calls `each` with each piece of it."""
    begin, times, text = time.perf_counter(), [], ""
    with ask(endpoint, prompt, max_tokens=tokens, seed=seed, stream=True) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
                each()
                text += choice["text"]
    return (times[0] - begin) * 1e3, (times[-1] - times[0]) * 1e3 / (tokens - 1), text
