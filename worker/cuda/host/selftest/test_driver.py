"""Tests of the driver API and NVRTC of the host model. Usage: test_driver.py OUT_DIR; every test runs in a process of its own."""

import ctypes as C
import os
import subprocess
import sys
import tempfile

import numpy as np

from driver import CudaError, Model

SOURCE = """
#include "common.cuh"
extern "C" __global__ void __launch_bounds__(256) add(float* x, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += value;
}
extern "C" __global__ void dynamic(float* x, int n) {
    HEARTH_DYNAMIC_SHARED(float, tile);
    for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = x[0];
    __syncthreads();
    if (threadIdx.x == 0) x[1] = tile[n - 1];
}
extern "C" __global__ void fixed(float* x) {
    __shared__ float tile[10000];
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    tile[thread] = 1.0f;
    if (thread == 0) x[0] = tile[0];
}
extern "C" __global__ void many_barriers(float* x, int n) {
    __shared__ float tile[32];
    float sum = 0.0f;
    for (int i = 0; i < n; i++) {
        tile[threadIdx.x] = i;
        __syncthreads();
        sum += tile[31 - threadIdx.x];
        __syncthreads();
    }
    x[threadIdx.x] = sum;
}
extern "C" __global__ void copy_host(float* x, const float* host) { x[threadIdx.x] = host[threadIdx.x]; }
extern "C" __global__ void write_host(float* host) { host[threadIdx.x] = 1.0f; }
extern "C" __global__ void wide(float* x, Weight w, long long big, float last) {
    if (threadIdx.x == 0) x[0] = w.ld + w.reserved + (float)big + last;
}
"""


class Setup(Model):
    def __init__(self, out):
        super().__init__(out)
        self.module = self.compile(SOURCE)
        self.n = 64
        self.x = self.upload(np.zeros(self.n, np.float32))

    def add(self, value, stream=None):
        values = [self.x, C.c_float(value), C.c_int(self.n)]
        vector = (C.c_void_p * 3)(*[C.cast(C.byref(v), C.c_void_p) for v in values])
        self.call("cuLaunchKernel", self.function(self.module, "add"), 1, 1, 1, 64, 1, 1, 0, stream, vector, None)

    def values(self):
        return self.download(self.x, np.zeros(self.n, np.float32))

    def code(self, name, *arguments):
        return getattr(self.cuda, name)(*arguments)

    def stream(self, flags=1):
        stream = C.c_void_p()
        self.call("cuStreamCreate", C.byref(stream), flags)
        return stream

    def event(self):
        event = C.c_void_p()
        self.call("cuEventCreate", C.byref(event), 0)
        return event

    def pinned(self, count):
        pointer = C.c_void_p()
        self.call("cuMemAllocHost_v2", C.byref(pointer), C.c_size_t(4 * count))
        return pointer, np.ctypeslib.as_array(C.cast(pointer, C.POINTER(C.c_float)), (count,))


def test_copies_wait_for_their_stream(m):
    pointer, host = m.pinned(m.n)
    stream = m.stream()
    host[:] = 2
    m.call("cuMemcpyHtoDAsync_v2", m.x, pointer, C.c_size_t(4 * m.n), stream)
    m.call("cuStreamSynchronize", stream)
    host[:] = 1
    assert (m.values() == 2).all()
    m.call("cuMemcpyDtoHAsync_v2", pointer, m.x, C.c_size_t(4 * m.n), stream)
    host[:] = 7
    assert m.code("cuStreamQuery", stream) == 600 and m.code("cuStreamQuery", stream) == 0
    assert (host == 2).all()


def test_kernels_write_pinned_memory_by_the_time_the_host_has_waited(m):
    pointer, host = m.pinned(m.n)
    host[:] = 7
    m.launch(m.function(m.module, "write_host"), 1, m.n, [pointer], wait=False)
    assert (host == 7).all()
    m.synchronize()
    assert (host == 1).all()


def test_freed_host_buffer(m):
    pointer, _ = m.pinned(m.n)
    m.call("cuMemcpyHtoDAsync_v2", m.x, pointer, C.c_size_t(4 * m.n), m.stream())
    m.call("cuMemFreeHost", pointer)
    assert m.code("cuCtxSynchronize") == 700
    return "copy of freed memory"


def test_freed_device_buffer(m):
    copying, freeing, other = m.stream(), m.stream(), m.allocate(256)
    m.call("cuMemcpyDtoDAsync_v2", m.x, other, C.c_size_t(256), copying)
    m.call("cuMemFreeAsync", other, freeing)
    m.call("cuStreamSynchronize", freeing)
    assert m.code("cuStreamSynchronize", copying) == 700
    return "copy of freed memory"


def test_registration(m):
    memory = np.zeros(4096, np.uint8)
    base = memory.ctypes.data
    register = lambda offset, size, flags=0: m.code("cuMemHostRegister_v2", C.c_void_p(base + offset), C.c_size_t(size), flags)
    assert register(0, 1024) == 0
    assert register(512, 1024) == 712 and register(0, 1024) == 712 and register(1023, 1) == 712
    assert register(1024, 1024, 8) == 0
    host = memory[:256].view(np.float32)
    host[:] = 3
    m.launch(m.function(m.module, "copy_host"), 1, m.n, [m.x, C.c_uint64(base)])
    assert (m.values() == 3).all()
    assert m.code("cuMemHostUnregister", C.c_void_p(base + 8)) == 713
    assert m.code("cuMemHostUnregister", C.c_void_p(base)) == 0
    try:
        m.launch(m.function(m.module, "write_host"), 1, 1, [C.c_uint64(base + 1024)])
    except CudaError as error:
        assert error.code == 700
        return "out of bounds"
    raise AssertionError("a kernel wrote to read-only memory")


def test_memory_budget(m):
    free, total = C.c_size_t(), C.c_size_t()
    m.call("cuMemGetInfo_v2", C.byref(free), C.byref(total))
    assert total.value == 2 << 30 and free.value == total.value - 512
    pointer = C.c_uint64()
    assert m.code("cuMemAlloc_v2", C.byref(pointer), C.c_size_t(total.value)) == 2
    for _ in range(40):  # More than the addresses would hold, were they not used again.
        m.call("cuMemAllocAsync", C.byref(pointer), C.c_size_t(1 << 30), None)
        m.call("cuMemFreeAsync", pointer, None)
    assert m.code("cuMemFree_v2", C.c_uint64(m.x.value + 8)) == 1
    assert m.code("cuMemcpyDtoH_v2", pointer, C.c_uint64(m.x.value + 8), C.c_size_t(256)) == 1


def test_a_freed_buffer_leaves_its_neighbours_alone(m):
    # Granules are shorter than pages, so that neighbours share some, and long buffers begin and end everywhere in them.
    for size in [*range((1 << 20) - 512, (1 << 20) + 8192, 512), (3 << 20) + 1]:
        for _ in range(8):
            before, freed, after = m.upload(np.full(4096, 3, np.uint8)), m.allocate(size), m.upload(np.full(4096, 4, np.uint8))
            m.call("cuMemsetD8_v2", freed, 7, C.c_size_t(size))
            m.free(freed)
            # The model's device memory is the process's own.
            rest = np.frombuffer(C.string_at(freed.value, size), np.uint8)
            assert not (rest == 7).any(), f"{size} bytes keep their content at {freed.value:#x}"
            for neighbour, value in [(before, 3), (after, 4)]:
                bytes_now = m.download(neighbour, np.zeros(4096, np.uint8))
                changed = (bytes_now != value).sum()
                assert changed == 0, f"{changed} bytes of a neighbour of {size} bytes at {freed.value:#x} changed"
                m.free(neighbour)


def test_launch_limits(m):
    def code(name, block, shared, arguments):
        try:
            m.launch(m.function(m.module, name), 1, block, arguments, shared=shared)
        except CudaError as error:
            return error.code
        return 0

    assert code("add", 256, 0, [m.x, 1.0, 64]) == 0
    assert code("add", 257, 0, [m.x, 1.0, 64]) == 1, "launch bounds"
    assert code("fixed", 1025, 0, [m.x]) == 1
    assert code("fixed", (8, 8, 16), 0, [m.x]) == 0
    assert code("dynamic", 64, 49152, [m.x, 100]) == 0
    assert code("dynamic", 64, 49156, [m.x, 100]) == 1, "without opting in"
    function = m.function(m.module, "dynamic")
    assert m.code("cuFuncSetAttribute", function, 8, 101376) == 0 and m.code("cuFuncSetAttribute", function, 8, 101380) == 1
    assert code("dynamic", 64, 101376, [m.x, 25344]) == 0
    assert code("fixed", 64, 9152, [m.x]) == 0 and code("fixed", 64, 9156, [m.x]) == 1
    value = C.c_int()
    m.call("cuFuncGetAttribute", C.byref(value), 1, m.function(m.module, "fixed"))
    assert value.value == 40000


def test_parameters_are_copied(m):
    weight = (C.c_byte * 32)()
    C.c_int.from_buffer(weight, 16).value = 40  # ld
    C.c_int.from_buffer(weight, 28).value = 2  # reserved
    m.launch(m.function(m.module, "wide"), 1, 32, [m.x, weight, C.c_longlong(1000), 0.5], wait=False)
    C.c_int.from_buffer(weight, 16).value = 0
    assert m.values()[0] == 1042.5


def test_events_order_streams(m):
    first, second, event, start = m.stream(), m.stream(), m.event(), m.event()
    m.call("cuEventRecord", start, first)
    m.add(1, first)
    m.call("cuEventRecord", event, first)
    m.call("cuStreamWaitEvent", second, event, 0)
    m.add(10, second)
    assert m.code("cuEventQuery", event) == 600
    m.call("cuStreamSynchronize", second)
    assert m.code("cuEventQuery", event) == 0
    assert (m.values() == 11).all()
    elapsed = C.c_float()
    m.call("cuEventElapsedTime", C.byref(elapsed), start, event)
    assert elapsed.value >= 0
    m.call("cuEventSynchronize", event)
    m.call("cuStreamDestroy_v2", second)
    assert m.code("cuStreamSynchronize", second) == 400


class KernelNode(C.Structure):
    _fields_ = [("function", C.c_void_p), ("shape", C.c_uint * 7), ("parameters", C.c_void_p), ("extra", C.c_void_p),
                ("kernel", C.c_void_p), ("context", C.c_void_p)]


class MemsetNode(C.Structure):
    _fields_ = [("to", C.c_uint64), ("pitch", C.c_size_t), ("value", C.c_uint), ("element", C.c_uint), ("width", C.c_size_t),
                ("height", C.c_size_t)]


class CopyNode(C.Structure):
    _fields_ = [(name, C.c_uint64) for name in
                "sx sy sz slod stype shost sdevice sarray r0 spitch sheight dx dy dz dlod dtype dhost ddevice darray r1 dpitch dheight "
                "width height depth".split()]


def test_graphs(m):
    y = m.allocate(4 * m.n)
    graph, fill, kernel, copy, instance = (C.c_void_p() for _ in range(5))
    m.call("cuGraphCreate", C.byref(graph), 0)
    memset = MemsetNode(m.x.value, 0, 0, 4, m.n, 1)
    m.call("cuGraphAddMemsetNode", C.byref(fill), graph, None, C.c_size_t(0), C.byref(memset), None)

    def node(value):
        values = [C.c_uint64(m.x.value), C.c_float(value), C.c_int(m.n)]
        vector = (C.c_void_p * 3)(*[C.cast(C.byref(v), C.c_void_p) for v in values])
        result = KernelNode(m.function(m.module, "add").value, (C.c_uint * 7)(1, 1, 1, 64, 1, 1, 0), C.cast(vector, C.c_void_p))
        result.keep = values, vector
        return result

    m.call("cuGraphAddKernelNode_v2", C.byref(kernel), graph, C.byref(fill), C.c_size_t(1), C.byref(node(5)))
    transfer = CopyNode(stype=2, sdevice=m.x.value, dtype=2, ddevice=y.value, width=4 * m.n, height=1, depth=1)
    m.call("cuGraphAddMemcpyNode", C.byref(copy), graph, C.byref(kernel), C.c_size_t(1), C.byref(transfer), None)
    m.call("cuGraphInstantiateWithFlags", C.byref(instance), graph, C.c_ulonglong(0))
    read = lambda: m.download(y, np.zeros(m.n, np.float32))
    m.call("cuGraphLaunch", instance, None)
    assert (read() == 5).all()
    m.call("cuGraphExecKernelNodeSetParams_v2", instance, kernel, C.byref(node(6)))
    m.call("cuGraphLaunch", instance, None)
    m.call("cuGraphLaunch", instance, None)
    assert (read() == 6).all()
    m.call("cuGraphExecDestroy", instance)
    m.call("cuGraphDestroy", graph)


def test_errors_stay(m):
    try:
        m.launch(m.function(m.module, "copy_host"), 1, 1, [m.x, C.c_uint64(64)])
    except CudaError as error:
        assert error.code == 700
    assert m.code("cuCtxSynchronize") == 700 and m.code("cuMemFree_v2", m.x) == 700
    text = C.c_char_p()
    m.call("cuGetErrorName", 700, C.byref(text))
    assert text.value == b"CUDA_ERROR_ILLEGAL_ADDRESS"
    return "out of bounds"


def test_compiler(m):
    for options, code in [(["--no-such-option"], 5), (["--gpu-architecture=sm_91"], 5), (["-DX=", "-D", "Y=2", "-maxrregcount=64"], 0)]:
        try:
            m.compile(SOURCE, options=options)
            assert code == 0
        except CudaError as error:
            assert error.code == code, options
    try:
        m.compile('extern "C" __global__ void bad(float* x) { x[0] = unknown; }', name="bad.cu")
        raise AssertionError("it compiled")
    except CudaError as error:
        assert error.code == 6 and "bad.cu:1" in str(error) and "unknown" in str(error)
    try:
        m.compile("#include <cstdint>\n")
        raise AssertionError("a system header was found")
    except CudaError as error:
        assert error.code == 6
    try:
        m.compile(SOURCE, arch="sm_90")
        raise AssertionError("sm_90 ran on 8.9")
    except CudaError as error:
        assert error.code == 209
    disabled = '#if 0\nextern "C" __global__ void off() {}\n#endif\nextern "C" __global__ void on() {}\n'
    m.function(m.compile(disabled), "on")


def test_clock_restarts(m):
    other = m.compile(SOURCE)
    for module, turns in [(other, 100_000), (m.module, 200_000), (other, 10), (m.module, 10)]:
        m.launch(m.function(module, "many_barriers"), 1, 32, [m.x, turns])
        assert np.isclose(m.values()[0], turns * (turns - 1) / 2, rtol=1e-2)


def test_entries_by_name(m):
    for name in [b"cuMemAlloc", b"cuMemAlloc_v2", b"cuLaunchKernel"]:
        entry, found = C.c_void_p(), C.c_int()
        m.call("cuGetProcAddress_v2", name, C.byref(entry), 12080, C.c_uint64(0), C.byref(found))
        assert entry.value and found.value == 0
    assert m.code("cuGetProcAddress_v2", b"cuNothing", C.byref(entry), 12080, C.c_uint64(0), C.byref(found)) == 500


def main(out, file, names, seeds=("",)):
    """Runs each test in a process of its own, once for each order of threads and streams."""
    for name, seed in [(name, seed) for name in names for seed in seeds]:
        with tempfile.NamedTemporaryFile("r") as report:
            environment = dict(os.environ, HEARTH_HOST_MODEL_REPORT=report.name, HEARTH_HOST_MODEL_SEED=seed)
            if seed == "":
                del environment["HEARTH_HOST_MODEL_SEED"]
            result = subprocess.run([sys.executable, file, out, name], env=environment, capture_output=True, text=True)
            text = report.read()
        begins = result.stdout.strip()
        passed = result.returncode == 0 and text.startswith(begins) and (begins != "" or text == "")
        assert passed, f"{name}, seed {seed!r}: {result.returncode}\nreport: {text}\n{result.stdout}{result.stderr}"
        print(name, seed)


def tests(names):
    return [name for name in names if name.startswith("test_")]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(globals()[sys.argv[2]](Setup(sys.argv[1])) or "")
    else:
        main(sys.argv[1], __file__, tests(globals()))
