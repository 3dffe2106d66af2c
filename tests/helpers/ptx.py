"""Triton kernels as the compiler leaves them, for compute capability 9.0; no GPU is needed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def compiled(kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any], warps: int) -> Mapping[str, str]:
    """Compile a kernel for arguments like these; returns its text after each stage, by the stage's name.

    As at a launch, it is compiled for addresses and integers that are multiples of 16 where these are.
    """
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    values = dict(zip(kernel.arg_names, arguments, strict=False))
    signature = {name: "constexpr" if value is None else mangle_type(value) for name, value in values.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    fixed = {(kernel.arg_names.index(name),): None for name, value in values.items() if value is None}
    fixed |= {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    multiples = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name, value in values.items() if _is_even(value)
    }
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return compile_kernel(
        ASTSource(kernel, signature, fixed, multiples), target=GPUTarget("cuda", 90, 32), options=options
    ).asm


def _is_even(value: object) -> bool:
    number = value.data_ptr() if isinstance(value, Tensor) else value
    return type(number) is int and number % 16 == 0


def vectors(ptx: str) -> Counter[str]:
    """Count a kernel's reads and writes of global memory that take several values at once: `ld.global.v4`."""
    found = re.findall(r"\b((?:ld|st)\.global)[\w.:]*?\.(v[248])\b", ptx)
    return Counter(".".join(each) for each in found)


def accesses(ptx: str, parameter: int) -> list[str]:
    """List a kernel's reads and writes of what a parameter points to, and all barriers, as they stand in its text.

    The parameter's number counts those that are not compiled in.
    """
    addresses, found = set[str](), list[str]()
    for raw in ptx.splitlines():
        line = re.sub(r"^@!?%\w+\s+", "", raw.partition("//")[0].strip())
        operator, _, operands = line.partition(" ")
        registers = re.findall(r"%\w+", operands)
        if operator.startswith(("bar.sync", "barrier.sync")):
            found.append("barrier")
        elif operator.startswith("ld.param"):
            _set(addresses, registers[0], f"_param_{parameter}]" in operands)
        elif operator.startswith(("ld.global", "st.global")):
            place = re.search(r"\[\s*(%\w+)", operands)
            assert place is not None, line
            if place[1] in addresses:
                found.append("read" if operator.startswith("ld") else "write")
        elif len(registers) > 1 and operator.startswith(("add", "sub", "mad", "mov", "cvta", "selp")):
            _set(addresses, registers[0], not addresses.isdisjoint(registers[1:]))
    return found


def _set(addresses: set[str], register: str, is_address: bool) -> None:
    (addresses.add if is_address else addresses.discard)(register)
