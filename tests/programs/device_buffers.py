# Device memory through mpi4py, which loads its MPI library privately (RTLD_LOCAL), after the preloaded library has started.
import ctypes
import random
import sys
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
peer = rank ^ 1

cuda = ctypes.CDLL("libcuda.so.1")


def check(code):
    assert code == 0, f"CUDA error {code}"


count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
check(cuda.cuInit(0))
check(cuda.cuDeviceGetCount(ctypes.byref(count)))
check(cuda.cuDeviceGet(ctypes.byref(device), rank % count.value))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))

GUARD = 64


class Buffer:
    """Device memory with guards around it, and what mpi4py takes for a buffer."""

    def __init__(self, bytes):
        self.bytes = bytes
        self.base = ctypes.c_uint64()
        check(cuda.cuMemAlloc_v2(ctypes.byref(self.base), ctypes.c_size_t(bytes + 2 * GUARD)))
        self.put(None)
        self.mpi = MPI.buffer.fromaddress(self.base.value + GUARD, bytes)

    def put(self, payload):
        rest = b"\xa5" * GUARD
        image = rest + (b"\xa5" * self.bytes if payload is None else payload) + rest
        check(cuda.cuMemcpyHtoD_v2(self.base, image, ctypes.c_size_t(len(image))))
        check(cuda.cuCtxSynchronize())

    def check(self, payload):
        image = ctypes.create_string_buffer(self.bytes + 2 * GUARD)
        check(cuda.cuCtxSynchronize())
        check(cuda.cuMemcpyDtoH_v2(image, self.base, ctypes.c_size_t(len(image))))
        rest = b"\xa5" * GUARD
        assert image.raw == rest + payload + rest, f"wrong contents, {self.bytes} bytes"

    def free(self):
        check(cuda.cuMemFree_v2(self.base))


def data(sender, bytes, what):
    return random.Random(f"{sender} {bytes} {what}").randbytes(bytes)


# A message to itself makes a rank one that uses a device; after the barrier each knows it of the other.
own = Buffer(100), Buffer(100)
own[0].put(data(rank, 100, "own"))
MPI.COMM_SELF.Sendrecv(own[0].mpi, 0, 0, own[1].mpi, 0, 0)
own[1].check(data(rank, 100, "own"))
world.Barrier()

for n in (1, 61, 5000, 70001, (1 << 20) + 3):
    out, into = Buffer(n), Buffer(n)

    def expect(what, status=None):
        if status is not None:
            assert (status.source, status.Get_count(MPI.BYTE)) == (peer, n)
        into.check(data(peer, n, what))
        into.put(None)

    status = MPI.Status()
    out.put(data(rank, n, "blocking"))
    if rank == 0:
        world.Send(out.mpi, peer, 1)
        world.Recv(into.mpi, peer, 1, status)
    else:
        world.Probe(peer, 1, status)
        assert status.Get_count(MPI.BYTE) == n
        world.Recv(into.mpi, peer, 1, status)
        world.Send(out.mpi, peer, 1)
    expect("blocking", status)

    out.put(data(rank, n, "requests"))
    requests = [world.Irecv(into.mpi, peer, 2), world.Isend(out.mpi, peer, 2)]
    MPI.Request.Waitall(requests)
    expect("requests")

    out.put(data(rank, n, "both"))
    world.Sendrecv(out.mpi, peer, 3, into.mpi, peer, 3, status)
    expect("both", status)

    receive, send = world.Recv_init(into.mpi, peer, 4), world.Send_init(out.mpi, peer, 4)
    for what in ("first", "second"):
        out.put(data(rank, n, what))
        MPI.Prequest.Startall([receive, send])
        send.Wait()
        receive.Wait(status)
        expect(what, status)
    receive.Free()
    send.Free()

    # mpi4py asks for MPI_THREAD_MULTIPLE, and one thread calls MPI: what is exchanged again and again is written before it is matched.
    for step in range(8):
        out.put(data(rank, n, step))
        receive = world.Irecv(into.mpi, peer, 7)
        world.Barrier()
        MPI.Request.Waitall([receive, world.Isend(out.mpi, peer, 7)])
        expect(step)

    # Between the device and host memory.
    out.put(data(rank, n, "down"))
    host = bytearray(n)
    world.Sendrecv(out.mpi, peer, 5, host, peer, 5)
    assert host == data(peer, n, "down"), n
    world.Sendrecv(host, peer, 6, into.mpi, peer, 6)
    into.check(data(rank, n, "down"))
    out.free()
    into.free()
world.Barrier()
if rank == 0:
    print("passed 5 cases")
sys.stdout.flush()
