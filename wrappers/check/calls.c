/* Host messages through every kind of exported function, 2 ranks; prints "ok" on rank 0. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            MPI_Abort(MPI_COMM_WORLD, 1); \
        } \
    } while (0)

enum { N = 1000 };

static void point_to_point(MPI_Comm comm, int rank) {
    int other = 1 - rank, out[N], in[N], flag, index, count;
    MPI_Status status, statuses[2];
    MPI_Request requests[2];
    for (int i = 0; i < N; ++i) out[i] = i + 1000 * rank;
    if (rank == 0) {
        CHECK(MPI_Send(out, N, MPI_INT, other, 7, comm) == MPI_SUCCESS);
        CHECK(MPI_Ssend(out, N, MPI_INT, other, 8, comm) == MPI_SUCCESS);
    } else {
        MPI_Probe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &status);
        CHECK(status.MPI_SOURCE == other && status.MPI_TAG == 7);
        MPI_Get_count(&status, MPI_INT, &count);
        CHECK(count == N);
        MPI_Recv(in, N, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &status);
        CHECK(in[N - 1] == N - 1);
        MPI_Recv(in, N, MPI_INT, other, 8, comm, MPI_STATUS_IGNORE);
    }
    memset(in, 0, sizeof in);
    MPI_Sendrecv(out, N, MPI_INT, other, 1, in, N, MPI_INT, other, 1, comm, MPI_STATUS_IGNORE);
    CHECK(in[5] == 5 + 1000 * other);
    memset(in, 0, sizeof in);
    MPI_Irecv(in, N, MPI_INT, other, 2, comm, &requests[0]);
    MPI_Isend(out, N, MPI_INT, other, 2, comm, &requests[1]);
    MPI_Waitall(2, requests, statuses);
    CHECK(requests[0] == MPI_REQUEST_NULL && requests[1] == MPI_REQUEST_NULL);
    CHECK(statuses[0].MPI_SOURCE == other && statuses[0].MPI_TAG == 2 && in[6] == 6 + 1000 * other);
    MPI_Recv_init(in, N, MPI_INT, other, 3, comm, &requests[0]);
    MPI_Send_init(out, N, MPI_INT, other, 3, comm, &requests[1]);
    for (int round = 0; round < 3; ++round) {
        MPI_Startall(2, requests);
        int done = 0;
        while (done < 2) {
            MPI_Waitany(2, requests, &index, MPI_STATUS_IGNORE);
            CHECK(index == 0 || index == 1);
            ++done;
        }
    }
    MPI_Request_free(&requests[0]);
    MPI_Request_free(&requests[1]);
    MPI_Irecv(in, N, MPI_INT, MPI_PROC_NULL, 3, comm, &requests[0]);
    do MPI_Test(&requests[0], &flag, MPI_STATUS_IGNORE); while (!flag);
    MPI_Iprobe(other, 99, comm, &flag, MPI_STATUS_IGNORE);
    CHECK(!flag);
}

static void matched_probe(MPI_Comm comm, int rank) {
    int other = 1 - rank, value = rank, got = -1;
    MPI_Message message;
    MPI_Request request;
    MPI_Isend(&value, 1, MPI_INT, other, 4, comm, &request);
    MPI_Mprobe(other, 4, comm, &message, MPI_STATUS_IGNORE);
    MPI_Mrecv(&got, 1, MPI_INT, &message, MPI_STATUS_IGNORE);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    CHECK(got == other);
}

static void collectives(MPI_Comm comm, int rank) {
    int sum, mine = rank + 1, all[2], memory;
    MPI_Win win;
    MPI_Barrier(comm);
    MPI_Allreduce(&mine, &sum, 1, MPI_INT, MPI_SUM, comm);
    CHECK(sum == 3);
    MPI_Allgather(&mine, 1, MPI_INT, all, 1, MPI_INT, comm);
    CHECK(all[0] == 1 && all[1] == 2);
    MPI_Bcast(&mine, 1, MPI_INT, 0, comm);
    CHECK(mine == 1);
    /* No data is checked: MPICH 4.0.2 (Debian) loses Put on such windows, with or without this library. */
    MPI_Win_create(&memory, sizeof memory, sizeof memory, MPI_INFO_NULL, comm, &win);
    memory = -1;
    MPI_Win_fence(0, win);
    MPI_Put(&rank, 1, MPI_INT, 1 - rank, 0, 1, MPI_INT, win);
    MPI_Win_fence(0, win);
    MPI_Win_free(&win);
}

#ifdef LARGE_COUNT
static void large_counts(MPI_Comm comm, int rank) {
    int value = rank, got = -1;
    MPI_Sendrecv_c(&value, (MPI_Count)1, MPI_INT, 1 - rank, 5, &got, (MPI_Count)1, MPI_INT, 1 - rank, 5, comm, MPI_STATUS_IGNORE);
    CHECK(got == 1 - rank);
}
#endif

/* With a panic injected into MPI_Send or MPI_Barrier: the first returns an error, the second synchronizes all the same. */
static void injected(MPI_Comm comm, int rank) {
    int code = MPI_Send(&rank, 1, MPI_INT, MPI_PROC_NULL, 0, comm);
    if (rank == 0) printf("send %s\n", code == MPI_ERR_OTHER || code == MPI_ERR_INTERN ? "error" : code ? "other" : "success");
    code = MPI_Barrier(comm);
    if (rank == 0) printf("barrier %s\n", code ? "error" : "success");
}

int main(int argc, char **argv) {
    int rank, size;
    MPI_Comm dup, half;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    CHECK(size == 2);
    if (getenv("ANABRANCH_INJECT_PANIC")) {
        injected(MPI_COMM_WORLD, rank);
        MPI_Finalize();
        return 0;
    }
    MPI_Comm_dup(MPI_COMM_WORLD, &dup);
    MPI_Comm_split(dup, rank, 0, &half);
    point_to_point(dup, rank);
    matched_probe(MPI_COMM_WORLD, rank);
    collectives(dup, rank);
#ifdef LARGE_COUNT
    large_counts(dup, rank);
#endif
    MPI_Comm_free(&half);
    MPI_Comm_free(&dup);
    if (rank == 0) puts("ok");
    MPI_Finalize();
    return 0;
}
