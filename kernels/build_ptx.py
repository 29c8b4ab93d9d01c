#!/usr/bin/env python3
"""Compiles src/cuda/kernels.cu to src/kernels.ptx with NVRTC, which needs no GPU and no CUDA toolkit.

    python3 -m venv v && v/bin/pip install nvidia-cuda-nvrtc-cu11==11.8.89
    v/bin/python kernels/build_ptx.py

compute_60 and the PTX ISA of CUDA 11.8 (7.8) are accepted by every driver since R520 on every GPU since Pascal.
The first line carries a digest of the sources, which a test compares with the sources as they are.
"""
import ctypes, glob, os, site, sys

HERE = os.path.dirname(os.path.abspath(__file__))
CUDA = os.path.join(HERE, "src", "cuda")
OPTIONS = [b"--gpu-architecture=compute_60", b"--fmad=false", b"--ftz=false", b"--prec-div=true", b"--prec-sqrt=true", b"-default-device"]


def fnv1a(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def nvrtc():
    for root in [os.environ.get("NVRTC_ROOT", "")] + site.getsitepackages():
        for path in sorted(glob.glob(os.path.join(root, "nvidia", "cuda_nvrtc", "lib", "libnvrtc.so.*"))):
            return ctypes.CDLL(path)
    sys.exit("no NVRTC: pip install nvidia-cuda-nvrtc-cu11==11.8.89, or set NVRTC_ROOT")


def main():
    names = sorted(n for n in os.listdir(CUDA) if n.endswith((".cu", ".cuh")))
    sources = {n: open(os.path.join(CUDA, n), "rb").read() for n in names}
    headers = [n for n in names if n.endswith(".cuh")]
    lib, program = nvrtc(), ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*[sources[n] for n in headers])
    includes = (ctypes.c_char_p * len(headers))(*[n.encode() for n in headers])
    code = lib.nvrtcCreateProgram(ctypes.byref(program), sources["kernels.cu"], b"kernels.cu", len(headers), texts, includes)
    assert code == 0, f"nvrtcCreateProgram: {code}"
    code = lib.nvrtcCompileProgram(program, len(OPTIONS), (ctypes.c_char_p * len(OPTIONS))(*OPTIONS))
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    if log.value.strip():
        print(log.value.decode(), file=sys.stderr)
    if code != 0:
        sys.exit(f"nvrtcCompileProgram: {code}")
    lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    digest = fnv1a(b"".join(n.encode() + b"\0" + sources[n] + b"\0" for n in names))
    with open(os.path.join(HERE, "src", "kernels.ptx"), "wb") as out:
        out.write(f"// sources {digest:016x}, compiled by build_ptx.py\n".encode() + ptx.value)


main()
