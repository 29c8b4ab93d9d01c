"""``python -m anabranch``: the command, where the folder of scripts is not in PATH."""

import os
import sys

import anabranch


def main():
    command = os.path.join(os.path.dirname(anabranch.library()), "..", "bin", "anabranch")
    command = os.path.normpath(command)
    try:
        os.execv(command, [command] + sys.argv[1:])
    except OSError as error:
        sys.exit("anabranch: %s cannot be started (%s): install the package anabranch again" % (command, error.strerror))


if __name__ == "__main__":
    main()
