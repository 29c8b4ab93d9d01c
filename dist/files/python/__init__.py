"""Anabranch from Python: what libanabranch.so counts, and which paths messages take.

The library is preloaded into the ranks of a program (``mpirun -np 2 anabranch exec python app.py``). Where it is not, every
function here says so by what it returns, and a program runs all the same.
"""

import ctypes
import functools
import os
import sysconfig

__version__ = "@VERSION@"
__all__ = ["is_loaded", "library", "paths", "stats", "version"]


@functools.lru_cache(maxsize=None)
def _interface():
    """The functions of anabranch.h in this process, or None where the library was not preloaded."""
    process = ctypes.CDLL(None)
    try:
        version_, counter = process.anabranch_version, process.anabranch_counter
        counter_name, paths_ = process.anabranch_counter_name, process.anabranch_paths
    except AttributeError:
        return None
    version_.restype = ctypes.c_char_p
    counter.argtypes, counter.restype = [ctypes.c_char_p], ctypes.c_uint64
    counter_name.argtypes, counter_name.restype = [ctypes.c_uint], ctypes.c_char_p
    paths_.argtypes, paths_.restype = [ctypes.c_char_p], ctypes.c_int
    return process


def is_loaded():
    """Whether the library is in this process."""
    return _interface() is not None


def version():
    """The version of the library in this process, or None."""
    interface = _interface()
    return None if interface is None else interface.anabranch_version().decode()


def stats():
    """The counters of this rank by name, as in ``{"sends_rts": 12, ...}``; None where the library is not in this process.

    Counters only grow. Those of all ranks together are written to the file that ``ANABRANCH_STATS`` names.
    """
    interface = _interface()
    if interface is None:
        return None
    counters, index = {}, 0
    while True:
        name = interface.anabranch_counter_name(index)
        if name is None:
            return counters
        counters[name.decode()] = interface.anabranch_counter(name)
        index += 1


def paths(chosen=None):
    """Have messages that this rank receives from now on take these paths only: "direct", "direct,host", or a list of names.

    None stands for those of ``ANABRANCH_PATHS`` again. Returns whether that is so now: False where the library is not in this
    process, takes no messages (before MPI_Init, after MPI_Finalize), or does not know a path.
    """
    interface = _interface()
    if interface is None:
        return False
    if chosen is not None and not isinstance(chosen, str):
        chosen = ",".join(chosen)
    return interface.anabranch_paths(None if chosen is None else chosen.encode()) == 0


def library():
    """The file to preload that was installed with this module, for launchers that do not start ``anabranch exec``."""
    name = os.path.join("lib", "libanabranch.so")
    # Below the folder that pip was given: an environment, or that of --user, or of --target.
    own = os.path.dirname(os.path.abspath(__file__))
    prefixes = [sysconfig.get_path("data"), os.path.join(own, "..")]
    prefixes += [os.path.join(own, *[".."] * up) for up in (4, 5)]
    for prefix in prefixes:
        path = os.path.normpath(os.path.join(prefix, name))
        if os.path.exists(path):
            return path
    raise FileNotFoundError("libanabranch.so is not where pip puts it: install the package anabranch again")
