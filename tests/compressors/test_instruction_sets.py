"""Each instruction set that the kernels are compiled for gives the same bits: replicas may run on unlike processors.

The kernels take the widest level that the processor has; `test_conformance.py` holds that one against the references,
and here the lower ones are held against it.
"""

import pytest
from helpers.compressor_cases import COMPRESSORS, WITH_KERNELS
from helpers.instruction_sets import LEVELS, at_level, steps

from fxcomp.compressors import Compressor, kernels
from fxcomp.testing.kernel_checks import assert_same_bits


@pytest.mark.one_in(7)
@WITH_KERNELS
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_an_instruction_set_changes_no_bit(compressor: Compressor) -> None:
    library = kernels._library()
    assert library is not None
    widest = steps(compressor)
    for level in list(LEVELS)[:-1]:
        with at_level(library, level):
            for where, results in steps(compressor).items():
                for one, two in zip(results, widest[where], strict=True):
                    assert_same_bits(one, two, f"{compressor}, {level}, {where}")
