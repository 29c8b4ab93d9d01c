! Send and Wait from Fortran by mpif.h; 2 ranks, prints "ok" on rank 0.
program calls
    implicit none
    include 'mpif.h'
    integer :: code, rank, value, got, request, status(MPI_STATUS_SIZE)
    call MPI_Init(code)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, code)
    value = rank
    call MPI_Irecv(got, 1, MPI_INTEGER, 1 - rank, 5, MPI_COMM_WORLD, request, code)
    call MPI_Send(value, 1, MPI_INTEGER, 1 - rank, 5, MPI_COMM_WORLD, code)
    call MPI_Wait(request, status, code)
    if (got /= 1 - rank .or. status(MPI_SOURCE) /= 1 - rank) call MPI_Abort(MPI_COMM_WORLD, 1, code)
    if (rank == 0) print '(a)', 'ok'
    call MPI_Finalize(code)
end program
