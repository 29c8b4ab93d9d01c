# CuPy arrays through mpi4py: MPI is loaded privately (RTLD_LOCAL) first, the CUDA driver later, by CuPy. What is received is
# compared with what its sender made, on this rank's host, from the same seed.
import sys
from mpi4py import MPI
import cupy
import numpy

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
right, left = (rank + 1) % size, (rank - 1) % size
GUARD = 16


def numbers(sender, count, turn):
    return numpy.random.default_rng([sender, count, turn]).random(count, dtype=numpy.float32)


def guarded(count):
    return cupy.full(count + 2 * GUARD, -1.0, dtype=cupy.float32)


messages = sent = 0
# Both of CuPy's pools: of plain allocations, and cudaMallocAsync.
for turn, pool in enumerate([cupy.cuda.MemoryPool(), cupy.cuda.MemoryAsyncPool()]):
    cupy.cuda.set_allocator(pool.malloc)
    for count in [1, 1000, 65537, 1 << 20, (3 << 20) + 5, 16 << 20]:
        world.Barrier()
        out, into = cupy.asarray(numbers(rank, count, turn)), guarded(count)
        cupy.cuda.get_current_stream().synchronize()
        place = into[GUARD : GUARD + count]
        if turn == 0:
            world.Sendrecv(out, right, 7, place, left, 7)
        else:
            MPI.Request.Waitall([world.Irecv(place, left, 8), world.Isend(out, right, 8)])
        messages, sent = messages + 1, sent + out.nbytes
        host = cupy.asnumpy(into)
        edges = numpy.concatenate([host[:GUARD], host[GUARD + count :]])
        if not (host[GUARD : GUARD + count] == numbers(left, count, turn)).all() or not (edges == -1).all():
            print(f"rank {rank}: wrong contents, {count} numbers, turn {turn}", file=sys.stderr)
            world.Abort(1)
totals = world.allreduce(messages), world.allreduce(sent)
if rank == 0:
    print(f"sent {totals[0]} messages, {totals[1]} bytes")
