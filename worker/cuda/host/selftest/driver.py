"""Compiles and launches kernels through the driver API and NVRTC of the host model, by ctypes."""

import ctypes as C
import os
import pathlib

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels"


class CudaError(Exception):
    def __init__(self, call, code):
        super().__init__(f"{call}: error {code}")
        self.code = code


class Model:
    """One device with its current context. `out` is the folder that build.sh filled."""

    def __init__(self, out):
        self.cuda = C.CDLL(os.path.join(out, "libcuda.so.1"))
        self.nvrtc = C.CDLL(os.path.join(out, "libnvrtc.so.12"))
        self.call("cuInit", 0)
        context = C.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", C.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code != 0:
            raise CudaError(name, code)

    def compile(self, source, name="kernel.cu", options=(), arch="sm_89", headers=("common.cuh", "ptx.cuh"), folder=KERNELS):
        """Returns a module; `source` is text, or the path of a file."""
        if isinstance(source, pathlib.Path):
            name, source = source.name, source.read_text()
        names = (C.c_char_p * len(headers))(*[header.encode() for header in headers])
        texts = (C.c_char_p * len(headers))(*[(folder / header).read_bytes() for header in headers])
        program = C.c_void_p()
        assert self.nvrtc.nvrtcCreateProgram(C.byref(program), source.encode(), name.encode(), len(headers), texts, names) == 0
        arguments = [f"--gpu-architecture={arch}", "-default-device", "--std=c++17", *options]
        vector = (C.c_char_p * len(arguments))(*[argument.encode() for argument in arguments])
        code = self.nvrtc.nvrtcCompileProgram(program, len(arguments), vector)
        size = C.c_size_t()
        self.nvrtc.nvrtcGetProgramLogSize(program, C.byref(size))
        self.log = C.create_string_buffer(size.value)
        self.nvrtc.nvrtcGetProgramLog(program, self.log)
        if code != 0:
            raise CudaError("nvrtcCompileProgram\n" + self.log.value.decode(), code)
        self.nvrtc.nvrtcGetCUBINSize(program, C.byref(size))
        cubin = C.create_string_buffer(size.value)
        self.nvrtc.nvrtcGetCUBIN(program, cubin)
        self.nvrtc.nvrtcDestroyProgram(C.byref(program))
        module = C.c_void_p()
        self.call("cuModuleLoadData", C.byref(module), cubin)
        return module

    def function(self, module, name, shared=0):
        function = C.c_void_p()
        self.call("cuModuleGetFunction", C.byref(function), module, name.encode())
        if shared > 48 * 1024:
            self.call("cuFuncSetAttribute", function, 8, shared)
        return function

    def launch(self, function, grid, block, arguments, shared=0, wait=True):
        """Arguments: an int is an `int`, a float a `float`, anything else a ctypes value."""
        grid = tuple(grid) + (1,) * (3 - len(grid)) if isinstance(grid, tuple) else (grid, 1, 1)
        block = tuple(block) + (1,) * (3 - len(block)) if isinstance(block, tuple) else (block, 1, 1)
        values = [C.c_int(a) if isinstance(a, int) else C.c_float(a) if isinstance(a, float) else a for a in arguments]
        vector = (C.c_void_p * max(len(values), 1))(*[C.cast(C.byref(value), C.c_void_p) for value in values])
        self.call("cuLaunchKernel", function, *grid, *block, shared, None, vector, None)
        if wait:
            self.synchronize()

    def synchronize(self):
        self.call("cuCtxSynchronize")

    def allocate(self, size):
        pointer = C.c_uint64()
        self.call("cuMemAlloc_v2", C.byref(pointer), C.c_size_t(size))
        return pointer

    def free(self, pointer):
        self.call("cuMemFree_v2", pointer)

    def upload(self, array):
        """Copies a numpy array to the device."""
        pointer = self.allocate(max(array.nbytes, 1))
        self.call("cuMemcpyHtoD_v2", pointer, array.ctypes.data_as(C.c_void_p), C.c_size_t(array.nbytes))
        return pointer

    def download(self, pointer, array):
        """Fills a numpy array from the device and returns it."""
        self.call("cuMemcpyDtoH_v2", array.ctypes.data_as(C.c_void_p), pointer, C.c_size_t(array.nbytes))
        return array
