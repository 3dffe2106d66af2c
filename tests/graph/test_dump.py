"""Dumped graphs: columns are aligned, and one long line pads no other."""

from fxcomp.graph.dump import WIDEST, aligned


def row(call: str, parameter: str = "") -> tuple[str, ...]:
    return ("%a", "compute", "f32[4]", "1.0 us", call, parameter)


def test_columns_are_as_wide_as_their_widest_cell():
    first, second = aligned([row("neg(%x)", "w"), row("neg(%longer)", "bias")])
    assert first.index("w", 30) == second.index("bias")


def test_a_call_of_hundreds_of_letters_pads_no_other_line():
    long = f"update({'%parameter, ' * 40})"
    first, second, third = aligned([row("neg(%x)", "w"), row(long, "bias"), ("output(%a)",)])
    assert len(first) < sum(WIDEST)
    assert second.endswith(f"{long}  bias")
    assert third == "output(%a)"
