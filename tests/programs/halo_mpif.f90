! Device and host buffers through the mpif.h bindings.
program halo_mpif
  use iso_c_binding
  implicit none
  include 'mpif.h'
  include 'halo_calls.inc'
end program
