#!/bin/sh
# Starts the solver built for the MPI library whose launcher started this script.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)

# Two libraries of one family differ in where their launcher lies, and a rank's launcher is its parent.
launcher=$(readlink "/proc/$PPID/exe" 2>/dev/null)
for note in "$here"/jacobi-*.prefix; do
    [ -f "$note" ] || continue
    read -r prefix < "$note"
    program=${note%.prefix}
    case $launcher in
    "$prefix"/bin/*)
        case $prefix in
        /usr) ;; # several families share it: decided below
        *) exec "$program" "$@" ;;
        esac ;;
    esac
done

if [ -n "${OMPI_COMM_WORLD_RANK-}${PMIX_NAMESPACE-}" ]; then
    order="openmpi openmpi5 mpich mpich5"
elif [ -n "${PMI_RANK-}${PMI_FD-}${PMI_ID-}" ]; then
    order="mpich mpich5 openmpi openmpi5"
else
    order="openmpi mpich openmpi5 mpich5" # one rank, no launcher
fi
for name in $order; do
    [ -x "$here/jacobi-$name" ] && exec "$here/jacobi-$name" "$@"
done
echo "jacobi: no build of the solver lies in $here; run cargo xtask build" >&2
exit 127
