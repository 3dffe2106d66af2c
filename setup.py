"""Build the C++ kernels; everything else is in pyproject.toml.

The kernels need a C++ compiler and Python's headers, not torch. Without them the install goes on, and the references
in plain torch run instead.
"""

import sys
from glob import glob

from setuptools import Extension, setup

# No fused multiply-add and no reordering: the kernels give the same bits as their references.
FLAGS = (
    ["/O2", "/std:c++17", "/fp:precise"]
    if sys.platform == "win32"
    else [
        "-std=c++17",
        "-O3",
        "-g0",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        "-pthread",
    ]
)

setup(
    ext_modules=[
        Extension(
            "fxcomp._kernels",
            sources=sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
