// All kernels of the project in one module. `build_ptx.py` turns this file into ../kernels.ptx.
#include "step.cuh"
#include "norm.cuh"
#include "field.cuh"
#include "columns.cuh"
#include "bytes.cuh"
