# PyTorch tensors through mpi4py, in the memory that the environment asks PyTorch for (PYTORCH_CUDA_ALLOC_CONF:
# expandable segments, cudaMallocAsync, its own pool). Tensors are freed between rounds, and the cache is emptied
# in some, which unmaps the chunks of expandable segments. What is received is compared with what its sender
# made, on this rank's host, from the same seed.
import os
import random
import sys
from mpi4py import MPI
import torch

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
right, left = (rank + 1) % size, (rank - 1) % size
seed = world.bcast(int(os.environ.get("SEED", random.randrange(1 << 31))))
choose = random.Random(seed)
GUARD = 16


def numbers(sender, count, turn):
    made = torch.Generator().manual_seed(seed + 1000003 * turn + 7919 * sender + count)
    return torch.rand(count, dtype=torch.float32, generator=made)


def raw(tensor):
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


messages = sent = 0
kept = []
for turn in range(int(os.environ.get("TURNS", 60))):
    count = choose.choice([1, 1000, 65537, 1 << 20, (3 << 20) + 5, 8 << 20, 16 << 20, (32 << 20) + 3])
    world.Barrier()
    out = numbers(rank, count, turn).to(device)
    into = torch.full((count + 2 * GUARD,), -1.0, dtype=torch.float32, device=device)
    torch.cuda.synchronize()
    place = into[GUARD : GUARD + count]
    if turn % 2:
        world.Sendrecv([raw(out), MPI.BYTE], right, 7, [raw(place), MPI.BYTE], left, 7)
    else:
        requests = [world.Irecv([raw(place), MPI.BYTE], left, 8), world.Isend([raw(out), MPI.BYTE], right, 8)]
        MPI.Request.Waitall(requests)
    messages, sent = messages + 1, sent + out.nbytes
    host = into.cpu()
    wrong = not torch.equal(host[GUARD : GUARD + count], numbers(left, count, turn))
    edges = torch.cat([host[:GUARD], host[GUARD + count :]])
    if wrong or not bool((edges == -1).all()):
        print(f"rank {rank}: wrong contents, {count} numbers, turn {turn}, seed {seed}", file=sys.stderr)
        world.Abort(1)
    # Some tensors stay, so that others lie in other chunks.
    if choose.random() < 0.3:
        kept.append(out)
    if choose.random() < 0.2:
        kept.clear()
    del out, into, place
    if choose.random() < 0.3:
        torch.cuda.empty_cache()
totals = world.allreduce(messages), world.allreduce(sent)
if rank == 0:
    print(f"sent {totals[0]} messages, {totals[1]} bytes")
