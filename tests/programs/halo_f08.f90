! Device and host buffers through the mpi_f08 bindings.
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
  integer :: round, k, seen(3)
  logical :: flag
  type(MPI_Message) :: message
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

    ! One buffer for both.
    call sim_fill(in_ptr, int(n, c_size_t), rank)
    call MPI_Sendrecv_replace(b, n, MPI_BYTE, peer, 6, peer, 6, MPI_COMM_WORLD, status)
    call sim_check(in_ptr, int(n, c_size_t), peer)

    ! A message that a probe has matched.
    call sim_fill(in_ptr, int(n, c_size_t), 99)
    call MPI_Isend(a, n, MPI_BYTE, peer, 7, MPI_COMM_WORLD, requests(1))
    call MPI_Mprobe(peer, MPI_ANY_TAG, MPI_COMM_WORLD, message, status)
    call MPI_Get_count(status, MPI_BYTE, got)
    if (got /= n .or. status%MPI_TAG /= 7) stop 7
    call MPI_Mrecv(b, n, MPI_BYTE, message, status)
    if (message /= MPI_MESSAGE_NULL .or. status%MPI_SOURCE /= peer) stop 8
    call MPI_Wait(requests(1), MPI_STATUS_IGNORE)
    call sim_check(in_ptr, int(n, c_size_t), peer)

    ! Asked again and again.
    call sim_fill(in_ptr, int(n, c_size_t), 99)
    call MPI_Irecv(b, n, MPI_BYTE, peer, 8, MPI_COMM_WORLD, requests(1))
    call MPI_Isend(a, n, MPI_BYTE, peer, 8, MPI_COMM_WORLD, requests(2))
    flag = .false.
    do while (.not. flag)
      call MPI_Test(requests(1), flag, status)
    end do
    call MPI_Get_count(status, MPI_BYTE, got)
    if (got /= n .or. requests(1) /= MPI_REQUEST_NULL) stop 9
    call MPI_Wait(requests(2), MPI_STATUS_IGNORE)
    call sim_check(in_ptr, int(n, c_size_t), peer)

    ! Persistent requests, in the order in which they are complete: each once, and then none. MPICH 4.0.2 tells these apart,
    ! but counts from 0 in mpi_f08, and has a number of its own for none.
    call MPI_Recv_init(b, n, MPI_BYTE, peer, 9, MPI_COMM_WORLD, requests(1))
    call MPI_Send_init(a, n, MPI_BYTE, peer, 9, MPI_COMM_WORLD, requests(2))
    do round = 1, 2
      call sim_fill(in_ptr, int(n, c_size_t), 99)
      call sim_fill(out_ptr, int(n, c_size_t), 10 * round + rank)
      call MPI_Startall(2, requests)
      do k = 1, 3
        call MPI_Waitany(2, requests, seen(k), status)
      end do
      if (seen(1) == seen(2) .or. seen(1) == seen(3) .or. seen(2) == seen(3)) stop 10
      call sim_check(in_ptr, int(n, c_size_t), 10 * round + peer)
    end do
    call MPI_Request_free(requests(1))
    call MPI_Request_free(requests(2))
    call sim_fill(out_ptr, int(n, c_size_t), rank)

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
