! Device and host buffers through the mpif.h bindings: Send, Recv, Isend, Irecv, Wait, Waitall, Sendrecv, Probe.
program halo_mpif
  use iso_c_binding
  implicit none
  include 'mpif.h'
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
  integer :: ierr, rank, nranks, peer, i, n, got
  integer :: status(MPI_STATUS_SIZE), statuses(MPI_STATUS_SIZE, 2), requests(2)
  type(c_ptr) :: out_ptr, in_ptr
  integer(c_int8_t), pointer, contiguous :: a(:), b(:)
  integer(c_int8_t), allocatable, target :: h(:)

  call MPI_Init(ierr)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
  call MPI_Comm_size(MPI_COMM_WORLD, nranks, ierr)
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
      call MPI_Send(a(1), n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, ierr)
      call MPI_Recv(b(1), n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, status, ierr)
    else
      call MPI_Probe(peer, 1, MPI_COMM_WORLD, status, ierr)
      call MPI_Get_count(status, MPI_BYTE, got, ierr)
      if (got /= n) stop 5
      call MPI_Recv(b(1), n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE, ierr)
      call MPI_Send(a(1), n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, ierr)
    end if
    call sim_check(in_ptr, int(n, c_size_t), peer)

    call sim_fill(in_ptr, int(n, c_size_t), 99)
    call MPI_Irecv(b(1), n, MPI_BYTE, peer, 2, MPI_COMM_WORLD, requests(1), ierr)
    call MPI_Isend(a(1), n, MPI_BYTE, peer, 2, MPI_COMM_WORLD, requests(2), ierr)
    call MPI_Waitall(2, requests, statuses, ierr)
    if (statuses(MPI_SOURCE, 1) /= peer .or. statuses(MPI_TAG, 1) /= 2) stop 6
    call sim_check(in_ptr, int(n, c_size_t), peer)

    call sim_fill(in_ptr, int(n, c_size_t), 99)
    call MPI_Irecv(b(1), n, MPI_BYTE, peer, 3, MPI_COMM_WORLD, requests(1), ierr)
    call MPI_Isend(a(1), n, MPI_BYTE, peer, 3, MPI_COMM_WORLD, requests(2), ierr)
    call MPI_Wait(requests(1), status, ierr)
    call MPI_Wait(requests(2), MPI_STATUS_IGNORE, ierr)
    call sim_check(in_ptr, int(n, c_size_t), peer)

    ! From the device into host memory.
    h = 0
    call MPI_Sendrecv(a(1), n, MPI_BYTE, peer, 4, h(1), n, MPI_BYTE, peer, 4, MPI_COMM_WORLD, status, ierr)
    call sim_fill(in_ptr, int(n, c_size_t), 99)
    call MPI_Sendrecv(h(1), n, MPI_BYTE, peer, 5, b(1), n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, status, ierr)
    call sim_check(in_ptr, int(n, c_size_t), rank)
    deallocate(h)
  end do
  call MPI_Barrier(MPI_COMM_WORLD, ierr)
  if (rank == 0) print '(a)', 'passed 4 cases'
  call MPI_Finalize(ierr)
end program
