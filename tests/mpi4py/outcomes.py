"""Runs mpi4py's own tests in one rank of a job and writes what became of each. `ci/mpi4py` starts it.

usage: outcomes.py SUITE TESTS OUTCOMES [--list | --device] [--no-numpy]

SUITE is the folder `test` of mpi4py's source distribution. TESTS is a file with the names of the tests to
run, one a line, in this order. The outcomes go to the file OUTCOMES.RANK. With --list rank 0 writes the names
of all tests to TESTS, and none is run. With --device each rank first sends itself a message from device
memory. --no-numpy is mpi4py's own: no test uses arrays of numpy.

Each line of OUTCOMES.RANK is a JSON object, written at once: the last one tells which test ran when a rank
died.
  {"start": NAME}
  {"test": NAME, "outcome": OUTCOME, "parts": [[OUTCOME, PART]...], "why": TEXT, "seconds": NUMBER}
  {"library": TEXT}     what the MPI library says of itself, before the first test
  {"end": true}         all tests are over, and the process is about to end
OUTCOME is ok, skipped, expected failure, unexpected success, FAIL or ERROR. PART is a subtest, if not ok.
"""

import argparse
import ctypes
import json
import os
import sys
import time
import traceback
import unittest

# The worst of a test's parts is the test's outcome.
ORDER = ["ok", "expected failure", "skipped", "unexpected success", "FAIL", "ERROR"]


class Outcomes(unittest.TestResult):
    """Writes one line when a test starts and one when it has ended."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        self.begin_parts()

    def begin_parts(self):
        self.parts = []
        self.began = time.monotonic()

    def write(self, **line):
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def begin(self, name):
        self.begin_parts()
        self.write(start=name)

    def finish(self, name):
        outcome = max((kind for kind, _, _ in self.parts), key=ORDER.index, default="ok")
        parts = [[kind, part] for kind, part, _ in self.parts if part is not None]
        why = "\n".join(why for _, _, why in self.parts if why)
        seconds = round(time.monotonic() - self.began, 3)
        self.write(test=name, outcome=outcome, parts=parts, why=why, seconds=seconds)

    def add(self, kind, test, why=""):
        # A subtest is told by its parameters.
        part = test._subDescription() if hasattr(test, "_subDescription") else None
        if isinstance(test, unittest.TestCase):
            self.parts.append((kind, part, why))
        else:
            # The setup of a class or module: none of its tests starts.
            self.begin(test.id())
            self.parts.append((kind, None, why))
            self.finish(test.id())

    def startTest(self, test):
        super().startTest(test)
        self.begin(test.id())

    def stopTest(self, test):
        super().stopTest(test)
        self.finish(test.id())

    def addError(self, test, err):
        self.add("ERROR", test, "".join(traceback.format_exception(*err)))

    def addFailure(self, test, err):
        self.add("FAIL", test, "".join(traceback.format_exception(*err)))

    def addSubTest(self, test, subtest, err):
        if err is not None:
            failed = issubclass(err[0], test.failureException)
            (self.addFailure if failed else self.addError)(subtest, err)

    def addSkip(self, test, reason):
        self.add("skipped", test, reason)

    def addExpectedFailure(self, test, err):
        self.add("expected failure", test)

    def addUnexpectedSuccess(self, test):
        self.add("unexpected success", test)


class Runner:
    """What mpi4py's `main.py` takes for a unittest runner."""

    def __init__(self, result, given, rank):
        self.result, self.given, self.rank = result, given, rank

    def run(self, found):
        from mpi4py import MPI

        if self.given.device:
            use_device(MPI)
        self.result.write(library=MPI.Get_library_version().strip("\0 \n"))
        by_name = {test.id(): test for test in leaves(found)}
        if not self.given.list:
            with open(self.given.tests, encoding="utf-8") as names:
                names = names.read().splitlines()
            for name in names:
                failed = by_name.get(f"unittest.loader._FailedTest.{name.split('.')[0]}")
                if failed:
                    # Its module cannot be imported, so it does not start.
                    self.result.begin_parts()
                    self.result.parts.append(("ERROR", None, str(failed._exception)))
                    self.result.finish(name)
            unittest.TestSuite(by_name[name] for name in names if name in by_name).run(self.result)
        elif self.rank == "0":
            with open(self.given.tests, "w", encoding="utf-8") as names:
                names.writelines(f"{name}\n" for name in by_name)
        return self.result


def leaves(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from leaves(test)
        else:
            yield test


def use_device(MPI):
    """Sends this rank a message from device memory: from then on the node uses devices."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def check(code):
        assert code == 0, f"CUDA error {code}"

    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    size, memory = 5000, [ctypes.c_uint64(), ctypes.c_uint64()]
    payload, arrived = os.urandom(size), ctypes.create_string_buffer(size)
    check(cuda.cuInit(0))
    check(cuda.cuDeviceGetCount(ctypes.byref(count)))
    check(cuda.cuDeviceGet(ctypes.byref(device), MPI.COMM_WORLD.rank % count.value))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(cuda.cuCtxSetCurrent(context))
    for place in memory:
        check(cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(size)))
    check(cuda.cuMemcpyHtoD_v2(memory[0], payload, ctypes.c_size_t(size)))
    check(cuda.cuCtxSynchronize())
    out, into = (MPI.buffer.fromaddress(place.value, size) for place in memory)
    MPI.COMM_SELF.Sendrecv(out, 0, 0, into, 0, 0)
    check(cuda.cuMemcpyDtoH_v2(arrived, memory[1], ctypes.c_size_t(size)))
    assert arrived.raw == payload, "a message from device memory has arrived wrong"
    MPI.COMM_WORLD.Barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("suite")
    parser.add_argument("tests")
    parser.add_argument("outcomes")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--no-numpy", action="store_true")
    given = parser.parse_args()
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
    sys.dont_write_bytecode = True
    sys.path.insert(0, given.suite)
    import main as suite

    with open(f"{given.outcomes}.{rank}", "w", encoding="utf-8") as file:
        result = Outcomes(file)
        result.begin("the start of the run")
        runner = Runner(result, given, rank)
        try:
            options = ["--no-builddir", "--quiet", *(["--no-numpy"] if given.no_numpy else [])]
            suite.main(module=None, argv=["main.py", *options], testRunner=runner)
        except SystemExit:
            pass  # It says whether all tests are ok; the file says which are.
        result.begin("the end of the run")
        result.write(end=True)


if __name__ == "__main__":
    main()
