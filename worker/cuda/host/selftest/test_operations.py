"""Tests of the operations that the host model carries out, against numpy. Usage: test_operations.py OUT_DIR"""

import pathlib
import sys

import numpy as np

from driver import Model

SOURCE = pathlib.Path(__file__).resolve().parent / "operations.cu"


def bf16_bits(x):
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def from_e4m3(codes):
    exponent, mantissa = codes.astype(int) >> 3 & 15, codes.astype(int) & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(codes & 0x80, -value, value).astype(np.float32)


def in_order(a, b, start):
    """Sums a [m][k] * b [k][n] over ascending k, each step rounded to float32."""
    total = start.copy()
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


def test_multiply(model, module, random):
    a, b = (bf16_bits(random.standard_normal(shape).astype(np.float32)) for shape in [(16, 16), (16, 8)])
    start = random.standard_normal((16, 8)).astype(np.float32)
    d = model.upload(np.concatenate([start.ravel(), np.ones(32, np.float32)]))
    model.launch(model.function(module, "multiply_bf16"), 1, 32, [d, model.upload(a), model.upload(b)], shared=1024)
    result = model.download(d, np.zeros(160, np.float32))
    # The terms are short of 2^53 of their last places: the sum is exact, and rounded once.
    exact = from_bf16(a).astype(np.float64) @ from_bf16(b).astype(np.float64) + start
    assert (result[:128].reshape(16, 8) == exact.astype(np.float32)).all()
    assert (result[128:] == 0).all()

    a, b = (random.integers(0, 256, shape).astype(np.uint8) for shape in [(16, 32), (8, 32)])
    a[a & 0x7F == 0x7F] = 0
    b[b & 0x7F == 0x7F] = 0
    model.launch(model.function(module, "multiply_e4m3"), 1, 32, [d, model.upload(a), model.upload(b)])
    result = model.download(d, np.zeros((16, 8), np.float32))
    assert (result == in_order(from_e4m3(a), from_e4m3(b).T, np.zeros((16, 8), np.float32))).all()


def test_conversion(model, module, _):
    codes = np.arange(256, dtype=np.uint8)
    out = model.allocate(512)
    model.launch(model.function(module, "convert_e4m3"), 1, 32, [out, model.upload(codes)])
    bits = model.download(out, np.zeros(256, np.uint16))
    numbers = codes & 0x7F != 0x7F
    assert (bits == bf16_bits(from_e4m3(codes)))[numbers].all()


def test_warp_operations(model, module, random):
    x = random.integers(0, 2**32, 32, dtype=np.uint32)
    out = model.allocate(12 * 128)
    model.launch(model.function(module, "warp_operations"), 1, 32, [out, model.upload(x)])
    rows = model.download(out, np.zeros((12, 32), np.uint32))
    lane = np.arange(32)
    votes = sum(1 << int(i) for i in lane if x[i] & 1)
    expected = [
        np.repeat(x[5], 32),
        x[(lane & ~7) | ((lane + 1) & 7)],
        x[np.where(lane < 3, lane, lane - 3)],
        x[np.where(lane % 8 < 3, lane, lane - 3)],
        x[np.where(lane % 16 + 3 > 15, lane, np.minimum(lane + 3, 31))],
        x[lane ^ 9],
        np.repeat(votes, 32),
        [sum(1 << int(i) for i in lane if x[i] % 5 == x[j] % 5) for j in lane],
        np.repeat(1, 32),
        [bin(v).count("1") | (32 - int(v).bit_length()) << 8 | (int(v & -v).bit_length()) << 16 for v in map(int, x)],
        (x & 0xFFFF) | (x[lane ^ 1] & 0xFFFF) << 16,
        np.repeat(bin(votes).count("1"), 32),
    ]
    for i, row in enumerate(expected):
        assert (rows[i] == np.asarray(row, np.uint32)).all(), i


def test_atomics(model, module, random):
    x = random.integers(-1000, 1000, 256).astype(np.int32)
    cells, total = model.upload(np.zeros(5, np.int32)), model.upload(np.zeros(1, np.float32))
    model.launch(model.function(module, "atomics"), 2, 128, [cells, total, model.upload(x)])
    x = np.tile(x[:128], 2)
    bits = np.bitwise_or.reduce(np.int32(1) << (x & 31))
    assert (model.download(cells, np.zeros(5, np.int32)) == [x.sum(), x.max(), x.min(), bits, 256]).all()
    assert model.download(total, np.zeros(1, np.float32))[0] == 128


if __name__ == "__main__":
    device = Model(sys.argv[1])
    compiled = device.compile(SOURCE)
    for name in [name for name in globals() if name.startswith("test_")]:
        globals()[name](device, compiled, np.random.default_rng(1))
        print(name)
