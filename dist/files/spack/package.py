# Copyright 2026 The Anabranch developers
# SPDX-License-Identifier: MIT OR Apache-2.0
#
# UNTRIED: written from Spack's documents, not run.
#   spack repo add ./spack
#   spack install anabranch        with anabranch-@VERSION@-linux-@MACHINE@.tar.gz in the folder where spack is started

import os

from spack.package import *


class Anabranch(Package):
    """Carries the GPU messages of MPI programs over every path of a node: a library that is preloaded, and a command."""

    # Nothing is published: the tarball of `cargo xtask dist` lies in the present folder.
    url = "file://{0}/anabranch-@VERSION@-linux-@MACHINE@.tar.gz".format(os.getcwd())

    license("MIT OR Apache-2.0")

    version("@VERSION@", sha256="@SHA256@")

    conflicts("platform=darwin", msg="Anabranch is for Linux")
    conflicts("platform=windows", msg="Anabranch is for Linux")
    requires("target=@MACHINE@:", msg="this tarball is for @MACHINE@")

    def install(self, spec, prefix):
        install_tree(".", prefix)

    # The module puts the command into PATH. LD_PRELOAD stays as it is: `anabranch exec` sets it for one program.
    def setup_run_environment(self, env):
        env.prepend_path("PATH", self.prefix.bin)
