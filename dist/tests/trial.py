# Two ranks exchange device buffers by mpi4py, and ask the library what became of the messages.
import ctypes

import anabranch
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, peer = world.Get_rank(), 1 - world.Get_rank()
cuda = ctypes.CDLL("libcuda.so.1")
BYTES = 1 << 20


def check(code):
    assert code == 0, "CUDA error %d" % code


device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), rank))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(2 * BYTES)))
from_address = MPI.memory.fromaddress if hasattr(MPI, "memory") else MPI.buffer.fromaddress
sent, received = from_address(address.value, BYTES), from_address(address.value + BYTES, BYTES)

assert anabranch.is_loaded() and anabranch.version() == anabranch.__version__
assert anabranch.paths("direct") and anabranch.paths(["direct", "host"]) and anabranch.paths()
assert not anabranch.paths("no such path")
before = anabranch.stats()
for turn in range(4):
    payload = bytes([1 + turn + 16 * rank]) * BYTES
    check(cuda.cuMemcpyHtoD_v2(address, payload, ctypes.c_size_t(BYTES)))
    check(cuda.cuCtxSynchronize())
    world.Sendrecv(sent, peer, recvbuf=received, source=peer)
    image = ctypes.create_string_buffer(BYTES)
    check(cuda.cuMemcpyDtoH_v2(image, ctypes.c_uint64(address.value + BYTES), ctypes.c_size_t(BYTES)))
    assert image.raw == bytes([1 + turn + 16 * peer]) * BYTES, "wrong contents in turn %d" % turn
after = anabranch.stats()
taken = after["sends_rts"] - before["sends_rts"]
assert after["sends_device"] - before["sends_device"] == 4 and taken > 0, after
if rank == 0:
    print("trial: %d of 4 messages were taken, as anabranch.stats() counts" % taken)
