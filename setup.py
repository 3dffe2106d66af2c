"""Build the C++ kernels, and the readme of the index; everything else is in pyproject.toml.

The kernels need a C++ compiler and Python's headers, not torch. Without them the install goes on, and the references
in plain torch run instead; why is written beside the package, where fxcomp's reports find it. Such a wheel is called
py3-none-any, as it fits every machine. FXCOMP_REQUIRE_KERNELS=1 lets the build fail instead: for who publishes wheels.
"""

import os
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

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

NOTICE = "_kernels_not_built.txt"  # fxcomp/compressors/kernels.py reads it


REQUIRED = "FXCOMP_REQUIRE_KERNELS"

HOME = "https://github.com/fxcomp/fxcomp"


class build_kernels(build_ext):
    """Builds them, or leaves a notice of why not."""

    def build_extension(self, ext):
        notice = self._notice()
        notice.unlink(missing_ok=True)
        printed = []
        try:
            with captured(printed):
                super().build_extension(ext)
        except (BaseError, CCompilerError) as error:
            reason = self._reason(error, printed[0])
            notice.parent.mkdir(parents=True, exist_ok=True)
            notice.write_text(f"{reason}\n")
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # an earlier build's are not this one's
            if not ext.optional:
                reason = f"{reason}\n  {REQUIRED} is set: unset it for a build without kernels"
            raise CompileError(reason) from error  # where the extension is optional, setuptools says so and goes on

    def copy_extensions_to_source(self):
        [ext] = self.extensions
        build_py, notice = self.get_finalized_command("build_py"), self._notice()
        inplace = Path(self._get_inplace_equivalent(build_py, ext)[0]).parent / NOTICE
        if notice.exists():
            shutil.copyfile(notice, inplace)
        else:
            inplace.unlink(missing_ok=True)
            super().copy_extensions_to_source()

    def _notice(self):
        return Path(self.build_lib) / "fxcomp" / NOTICE

    def _reason(self, error, printed):
        compiler = getattr(self.compiler, "compiler_so_cxx", None) or getattr(self.compiler, "compiler_so", None)
        if compiler and shutil.which(compiler[0]) is None:
            return f"no C++ compiler was found (there is no {compiler[0]})"
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)] or lines
        return f"a compiler was found, the build failed: {errors[0] if errors else error}"


class name_wheel(bdist_wheel):
    """Names a wheel after what is in it: without kernels it is for every machine."""

    def get_tag(self):
        built = Path(self.get_finalized_command("build").build_lib) / "fxcomp"
        self.root_is_pure = (built / NOTICE).exists()
        return ("py3", "none", "any") if self.root_is_pure else super().get_tag()


def readme():
    """Return README.md with links that work on an index, to the files of this version."""
    version = re.search(r'^__version__ = "(.+)"$', Path("fxcomp/__init__.py").read_text(), re.MULTILINE)[1]
    return re.sub(
        r"(\]\()(?![a-z]+:|#)", rf"\g<1>{HOME}/blob/v{version}/", Path("README.md").read_text(encoding="utf-8")
    )


def required():
    """Read whether a build without kernels is to fail."""
    told = os.environ.get(REQUIRED, "0")
    if told not in ("", "0", "1"):
        raise SystemExit(f"{REQUIRED} is 1 (a build without kernels fails) or 0; it is {told!r}")
    return told == "1"


@contextmanager
def captured(printed):
    """Append what compilers print to `printed`, all in one, and print it then: setuptools keeps nothing of it."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
        try:
            for descriptor in kept:
                os.dup2(file.fileno(), descriptor)
            yield
        finally:
            sys.stdout.flush()
            for descriptor, before in kept.items():
                os.dup2(before, descriptor)
                os.close(before)
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
            sys.stderr.write(printed[0])


setup(
    ext_modules=[
        Extension(
            "fxcomp._kernels",
            sources=sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=not required(),
        )
    ],
    cmdclass={"bdist_wheel": name_wheel, "build_ext": build_kernels},
    long_description=readme(),
    long_description_content_type="text/markdown",
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
