! Device and host buffers through the bindings of the module mpi.
program halo_use
  use iso_c_binding
  use mpi
  implicit none
  include 'halo_calls.inc'
end program
