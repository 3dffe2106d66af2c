"""Build chunkmax's kernel; everything else is in pyproject.toml. Without a C++ compiler the reference runs instead."""

import sys

from setuptools import Extension, setup

# No fused multiply-add and no reordering: the kernel gives the same bits as the reference.
FLAGS = ["/O2", "/std:c++17", "/fp:precise"] if sys.platform == "win32" else ["-std=c++17", "-O3", "-ffp-contract=off"]

setup(
    ext_modules=[
        Extension("fxcomp_more._chunkmax", ["fxcomp_more/chunkmax.cpp"], extra_compile_args=FLAGS, optional=True)
    ]
)
