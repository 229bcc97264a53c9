"""The model's own tests: every planted error is reported and every sound kernel passes. Usage: run.py OUT_DIR"""

import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from driver import CudaError, Model

HERE = pathlib.Path(__file__).resolve().parent
THREADS = 64

# Entry point, blocks, dynamic shared bytes, beginnings of the text (none: sound).
CASES = [
    ("out_of_bounds_read", 1, 0, ["out of bounds"]),
    ("out_of_bounds_write", 1, 0, ["out of bounds"]),
    ("read_of_unwritten", 1, 0, ["read of unwritten memory"]),
    ("shared_out_of_bounds", 1, 0, ["shared memory out of bounds"]),
    ("dynamic_out_of_bounds", 1, 4 * THREADS, ["shared memory out of bounds"]),
    ("shared_unwritten", 1, 0, ["read of unwritten shared memory"]),
    ("shared_race", 1, 0, ["shared memory race"]),
    ("shared_race_sound", 1, 0, []),
    ("shared_reuse", 1, 0, ["shared memory race"]),
    ("missing_syncwarp", 1, 0, ["shared memory race"]),
    ("missing_syncwarp_sound", 1, 0, []),
    ("syncwarp_across_warps", 1, 0, ["shared memory race"]),
    ("missing_cp_async_wait", 1, 0, ["cp.async not waited for"]),
    ("missing_cp_async_barrier", 1, 0, ["shared memory race", "cp.async not waited for"]),
    ("cp_async_sound", 1, 0, []),
    ("divergent_barrier", 1, 0, ["divergent barrier"]),
    ("two_barriers", 1, 0, ["divergent barrier"]),
    ("divergent_shuffle", 1, 0, ["divergent warp operation"]),
    ("global_race", 1, 0, ["global memory race"]),
    ("global_race_sound", 1, 0, []),
    ("race_between_blocks", 2, 0, ["global memory race"]),
    ("misaligned", 1, 0, ["misaligned address"]),
    ("use_after_free", 1, 0, ["use of freed memory"]),
    ("partial_masks_sound", 1, 0, []),
]


def run_case(out_dir, name, blocks, shared):
    """In a process of its own, since an error stays with the device."""
    model = Model(out_dir)
    function = model.function(model.compile(HERE / "planted.cu"), name)
    values = np.arange(1, THREADS + 1, dtype=np.float32)
    source, target = model.upload(values), model.allocate(values.nbytes)
    if name == "use_after_free":
        model.free(source)
    try:
        model.launch(function, blocks, THREADS, [target, source, THREADS], shared=shared)
    except CudaError as error:
        try:
            model.synchronize()
        except CudaError as again:
            sys.exit(3 if again.code == error.code else 4)
        sys.exit(5)


def test_planted(out_dir):
    for name, blocks, shared, beginnings in CASES:
        for seed in ["", "1", "2"]:
            with tempfile.NamedTemporaryFile("r") as report:
                environment = dict(os.environ, HEARTH_HOST_MODEL_REPORT=report.name)
                if seed:
                    environment["HEARTH_HOST_MODEL_SEED"] = seed
                command = [sys.executable, __file__, out_dir, name, str(blocks), str(shared)]
                result = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
                text = report.read()
            expected = 3 if beginnings else 0
            begins = any(text.startswith(beginning) for beginning in beginnings) if beginnings else text == ""
            assert result.returncode == expected and begins, f"{name}, seed {seed}: {result.returncode}\n{text}{result.stderr}"
            if not seed and text:
                print(text.strip())


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_case(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        test_planted(sys.argv[1])
