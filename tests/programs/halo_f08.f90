! Device and host buffers through the mpi_f08 bindings: Send, Recv, Isend, Irecv, Wait, Waitall, Sendrecv, Probe.
program halo_f08
  use iso_c_binding
  use mpi_f08
  implicit none
  interface
    subroutine sim_start(rank, size) bind(c)
      import; integer(c_int), value :: rank, size
    end subroutine
    function sim_new(bytes) bind(c) result(p)
      import; integer(c_size_t), value :: bytes; type(c_ptr) :: p
    end function
    subroutine sim_fill(p, bytes, seed) bind(c)
      import; type(c_ptr), value :: p; integer(c_size_t), value :: bytes; integer(c_int), value :: seed
    end subroutine
    subroutine sim_check(p, bytes, seed) bind(c)
      import; type(c_ptr), value :: p; integer(c_size_t), value :: bytes; integer(c_int), value :: seed
    end subroutine
  end interface
  integer, parameter :: sizes(4) = [61, 1000, 70000, 1000001]
  integer :: rank, nranks, peer, i, n, got
  type(MPI_Status) :: status, statuses(2)
  type(MPI_Request) :: requests(2)
  type(c_ptr) :: out_ptr, in_ptr
  integer(c_int8_t), pointer, contiguous :: a(:), b(:)
  integer(c_int8_t), allocatable, target :: h(:)

  call MPI_Init()
  call MPI_Comm_rank(MPI_COMM_WORLD, rank)
  call MPI_Comm_size(MPI_COMM_WORLD, nranks)
  call sim_start(rank, nranks)
  peer = ieor(rank, 1)
  do i = 1, 4
    n = sizes(i)
    out_ptr = sim_new(int(n, c_size_t))
    in_ptr = sim_new(int(n, c_size_t))
    call c_f_pointer(out_ptr, a, [n])
    call c_f_pointer(in_ptr, b, [n])
    allocate(h(n))

    call sim_fill(out_ptr, int(n, c_size_t), rank)
    if (rank == 0) then
      call MPI_Send(a, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD)
      call MPI_Recv(b, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, status)
    else
      call MPI_Probe(peer, 1, MPI_COMM_WORLD, status)
      call MPI_Get_count(status, MPI_BYTE, got)
      if (got /= n) stop 5
      call MPI_Recv(b, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE)
      call MPI_Send(a, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD)
    end if
    call sim_check(in_ptr, int(n, c_size_t), peer)

    call sim_fill(in_ptr, int(n, c_size_t), 99)
    call MPI_Irecv(b, n, MPI_BYTE, peer, 2, MPI_COMM_WORLD, requests(1))
    call MPI_Isend(a, n, MPI_BYTE, peer, 2, MPI_COMM_WORLD, requests(2))
    call MPI_Waitall(2, requests, statuses)
    if (statuses(1)%MPI_SOURCE /= peer .or. statuses(1)%MPI_TAG /= 2) stop 6
    call sim_check(in_ptr, int(n, c_size_t), peer)

    call sim_fill(in_ptr, int(n, c_size_t), 99)
    call MPI_Irecv(b, n, MPI_BYTE, peer, 3, MPI_COMM_WORLD, requests(1))
    call MPI_Isend(a, n, MPI_BYTE, peer, 3, MPI_COMM_WORLD, requests(2))
    call MPI_Wait(requests(1), status)
    call MPI_Wait(requests(2), MPI_STATUS_IGNORE)
    call sim_check(in_ptr, int(n, c_size_t), peer)

    ! From the device into host memory.
    h = 0
    call MPI_Sendrecv(a, n, MPI_BYTE, peer, 4, h, n, MPI_BYTE, peer, 4, MPI_COMM_WORLD, status)
    call sim_fill(in_ptr, int(n, c_size_t), 99)
    call MPI_Sendrecv(h, n, MPI_BYTE, peer, 5, b, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, status)
    call sim_check(in_ptr, int(n, c_size_t), rank)
    deallocate(h)
  end do
  call MPI_Barrier(MPI_COMM_WORLD)
  if (rank == 0) print '(a)', 'passed 4 cases'
  call MPI_Finalize()
end program
