! Send and Wait from Fortran by mpi_f08; 2 ranks, prints "ok" on rank 0.
program calls
    use mpi_f08
    implicit none
    integer :: rank, value, got
    type(MPI_Request) :: request
    type(MPI_Status) :: status
    call MPI_Init()
    call MPI_Comm_rank(MPI_COMM_WORLD, rank)
    value = rank
    call MPI_Irecv(got, 1, MPI_INTEGER, 1 - rank, 5, MPI_COMM_WORLD, request)
    call MPI_Send(value, 1, MPI_INTEGER, 1 - rank, 5, MPI_COMM_WORLD)
    call MPI_Wait(request, status)
    if (got /= 1 - rank .or. status%MPI_SOURCE /= 1 - rank) call MPI_Abort(MPI_COMM_WORLD, 1)
    if (rank == 0) print '(a)', 'ok'
    call MPI_Finalize()
end program
