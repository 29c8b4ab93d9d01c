# mpi4py loads its MPI library privately (RTLD_LOCAL), after the preloaded library has started.
import sys
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
right, left = (rank + 1) % size, (rank - 1) % size
for n in (0, 1, 61, 5000, 70000, 1 << 20):
    out = bytearray((rank * 7 + i) % 251 for i in range(n))
    into = bytearray(n)
    status = MPI.Status()
    world.Sendrecv(out, right, 3, into, left, 3, status)
    assert status.Get_count(MPI.BYTE) == n and status.source == left and status.tag == 3
    assert into == bytearray((left * 7 + i) % 251 for i in range(n)), n
    requests = [world.Irecv(into, left, 4), world.Isend(out, right, 4)]
    MPI.Request.Waitall(requests)
    assert world.sendrecv({"n": n}, right, source=left) == {"n": n}
assert world.allreduce(1) == size
world.Barrier()
if rank == 0:
    print("passed 6 cases")
sys.stdout.flush()
