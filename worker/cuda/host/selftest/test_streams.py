"""Tests of the order of streams: a missing wait of every kind is found, whatever order streams run in, and sound programs pass.
Usage: test_streams.py OUT_DIR; every test runs in a process of its own."""

import ctypes as C
import sys

import numpy as np

from test_driver import Setup, main, tests

SEEDS = ("", "1", "2", "3", "4")


class Lanes(Setup):
    """A stream of copies and one of kernels, and a page-locked buffer."""

    def __init__(self, out):
        super().__init__(out)
        self.copying, self.computing = self.stream(), self.stream()
        self.source, self.host = self.pinned(self.n)
        self.host[:] = 5

    def call(self, name, *arguments):
        code = self.code(name, *arguments)
        # Work that ran in the meantime may have failed, as on a GPU: end() tells.
        assert code in (0, 700, 719), f"{name}: error {code}"

    def copy(self, stream=None):
        self.call("cuMemcpyHtoDAsync_v2", self.x, self.source, C.c_size_t(4 * self.n), stream or self.copying)

    def record(self, stream, event=None):
        event = event or self.event()
        self.call("cuEventRecord", event, stream)
        return event

    def wait(self, stream, event):
        self.call("cuStreamWaitEvent", stream, event, 0)

    def end(self):
        """Whether the device has found an error."""
        return self.code("cuCtxSynchronize")


def test_sound(m):
    for turn in range(4):
        m.copy()
        m.wait(m.computing, m.record(m.copying))
        m.add(1 + turn, m.computing)
        m.wait(m.copying, m.record(m.computing))
    m.wait(m.computing, m.record(m.copying))
    assert m.end() == 0 and (m.values() == 9).all()


def test_sound_by_another_stream(m):
    between = m.stream()
    m.copy()
    m.wait(between, m.record(m.copying))
    m.wait(m.computing, m.record(between))
    m.add(1, m.computing)
    assert m.end() == 0 and (m.values() == 6).all()


def test_sound_by_the_host(m):
    m.copy()
    m.call("cuStreamSynchronize", m.copying)
    m.add(1, m.computing)
    m.call("cuEventSynchronize", m.record(m.computing))
    m.copy()
    assert m.end() == 0 and (m.values() == 5).all()


def test_sound_by_blocking_streams(m):
    m.copy(m.stream(0))
    m.add(1)
    m.copy(m.stream(0))
    assert m.end() == 0 and (m.values() == 5).all()


def test_kernel_that_does_not_wait_for_a_copy(m):
    m.copy()
    m.add(1, m.computing)
    assert m.end() == 719
    return "race between streams"


def test_copy_that_does_not_wait_for_a_kernel(m):
    m.copy()
    m.wait(m.computing, m.record(m.copying))
    m.add(1, m.computing)
    m.copy()
    assert m.end() == 719
    return "race between streams"


def test_copy_that_does_not_wait_for_a_reader(m):
    other = m.upload(np.zeros(m.n, np.float32))
    m.call("cuMemcpyDtoDAsync_v2", other, m.x, C.c_size_t(4 * m.n), m.computing)
    m.copy()
    assert m.end() == 719
    return "race between streams"


def test_fill_that_does_not_wait(m):
    m.copy()
    m.call("cuMemsetD32Async", m.x, 0, C.c_size_t(m.n), m.computing)
    assert m.end() == 719
    return "race between streams"


def test_kernels_of_two_streams(m):
    m.add(1, m.computing)
    m.add(1, m.copying)
    assert m.end() == 719
    return "race between streams"


def test_wait_for_an_event_that_is_recorded_again_later(m):
    event = m.record(m.copying)
    m.wait(m.computing, event)
    m.copy()
    m.record(m.copying, event)
    m.add(1, m.computing)
    assert m.end() == 719
    return "race between streams"


def test_other_bytes_are_no_race(m):
    half = 2 * m.n
    for first, stream in [(0, m.copying), (half, m.computing)]:
        at = C.c_uint64(m.x.value + first)
        m.call("cuMemcpyHtoDAsync_v2", at, C.c_void_p(m.source.value + first), C.c_size_t(half), stream)
    assert m.end() == 0 and (m.values() == 5).all()


def test_free_of_memory_in_use(m):
    other, stream = m.allocate(256), m.stream()
    m.call("cuMemsetD8Async", other, 1, C.c_size_t(256), m.copying)
    m.call("cuMemFreeAsync", other, stream)
    m.code("cuStreamQuery", m.copying)  # The host does not wait; the fill has run.
    assert m.end() == 700
    return "free of memory in use"


def test_sound_free(m):
    for _ in range(3):
        other = m.allocate(256)
        m.call("cuMemsetD8Async", other, 1, C.c_size_t(256), m.copying)
        m.wait(m.computing, m.record(m.copying))
        m.call("cuMemFreeAsync", other, m.computing)
    assert m.end() == 0


def test_staging_buffer_that_changes_too_early(m):
    m.copy()
    m.host[:] = 6
    assert m.end() == 719
    return "source of a copy changed"


def main_with_seeds(out):
    names = tests(globals())
    # Whether a copy sees the change depends on when it runs, as do frees before their users.
    by_order = [name for name in names if name.startswith(("test_free", "test_staging"))]
    main(out, __file__, [name for name in names if name not in by_order], SEEDS)
    main(out, __file__, by_order)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(globals()[sys.argv[2]](Lanes(sys.argv[1])) or "")
    else:
        main_with_seeds(sys.argv[1])
