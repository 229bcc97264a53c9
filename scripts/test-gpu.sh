#!/usr/bin/env bash
# The CUDA backend's tests on the GPU of this machine: every case of the host model's tests with sentinels around every buffer, then the
# short ones under compute-sanitizer. Without a GPU this fails, and says so.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${HEARTH_CACHE:-$HOME/.cache/hearth}

if ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1' && ! ls /usr/lib*/*/libcuda.so.1 /usr/local/nvidia/lib*/libcuda.so.1 >/dev/null 2>&1; then
    echo "make test-gpu: this machine has no NVIDIA driver (libcuda.so.1): nothing was tested." >&2
    echo "  run it on a machine with a GPU of compute capability 8.0 or newer and driver 525 or later" >&2
    exit 1
fi

scripts/bootstrap.sh gpu
export PATH="$HOME/.cargo/bin:$PATH"

# NVRTC of the machine's toolkit, or the one that bootstrap.sh installed.
nvrtc=$(ls -d "$cache"/py/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib 2>/dev/null | head -1 || true)
export LD_LIBRARY_PATH=${nvrtc:+$nvrtc:}${LD_LIBRARY_PATH:-}
export HEARTH_TEST_GPU=1

cargo test -p hearth-cuda --no-fail-fast

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [ -z "$sanitizer" ]; then
    echo "make test-gpu: compute-sanitizer is not on this machine (it comes with the CUDA toolkit): the tests passed, the sanitizer did not run." >&2
    exit 1
fi
binary=$(cargo test -p hearth-cuda --test cuda_operations --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*cuda_operations[^"]*\)".*/\1/p' | tail -1)
export HEARTH_TEST_SANITIZER=1
for tool in memcheck racecheck; do
    echo "compute-sanitizer $tool"
    "$sanitizer" --tool "$tool" --error-exitcode 1 "$binary" --test-threads 1 sanitizer_
done
