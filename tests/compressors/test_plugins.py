"""A compressor from another package: found by its name, checked like ours, and explained when it is broken."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.ranks import run_alone

from fxcomp.compressors import CATALOGUE, Int8, catalogue, compressor_of, parse_compressor
from fxcomp.compressors.facts import fields_of
from fxcomp.errors import BadOption

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


def _python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def _in_a_fork(code: str, *path: Path) -> str:
    """Return what code prints in a process that has fxcomp already, which starts sooner."""
    return run_alone(_printed, code, list(map(str, path)))


def _printed(code: str, path: list[str]) -> str:
    sys.path[:0] = path
    with redirect_stdout(StringIO()) as printed:
        exec(code, {"__name__": "__main__", "sys": sys})
    return printed.getvalue()


def _installed(folder: Path) -> Path:
    """Write what an installer leaves of the example: its announcement."""
    announcement = folder / "fxcomp_pool-0.1.0.dist-info"
    announcement.mkdir()
    (announcement / "METADATA").write_text("Metadata-Version: 2.1\nName: fxcomp-pool\nVersion: 0.1.0\n")
    _, _, section = (EXAMPLE / "pyproject.toml").read_text().partition('[project.entry-points."fxcomp.compressors"]')
    (announcement / "entry_points.txt").write_text("[fxcomp.compressors]" + section.replace('"', ""))
    return folder


def test_an_installed_compressor_is_found_by_name_and_travels_in_a_plan(tmp_path: Path) -> None:
    done = _python(
        "from fxcomp.plan.strategy import Strategy\n"
        "text = 'compress(pool(width=16))@gpu > all_reduce@world > decompress@gpu'\n"
        "assert str(Strategy.parse(text)) == text\n"
        "assert Strategy.parse(text).compressor.grain == 16\n"
        "print(type(Strategy.parse(text).compressor).__module__)",
        _installed(tmp_path),
        EXAMPLE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fxcomp_pool.pool\n"


def test_an_emitted_step_imports_it_from_its_own_package(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    printed = _in_a_fork(
        "from helpers.graphs import TWO, one_bucket\n"
        "from helpers.stages import lowered\n"
        "from fxcomp.codegen.emit import emit\n"
        "from fxcomp.passes.remove_dead_nodes import remove_dead_nodes\n"
        "from fxcomp.passes.thread_state import thread_state\n"
        "plan = one_bucket('compress(pool(width=4))@gpu > all_reduce@world > decompress@gpu')\n"
        "source = emit(remove_dead_nodes(thread_state(lowered(plan, TWO))))\n"
        "compile(source, 'step', 'exec')\n"
        "print(source)",
        _installed(tmp_path),
        EXAMPLE,
        tests,
    )
    lines = [line.strip() for line in printed.splitlines()]
    assert "from fxcomp_pool.pool import Pool" in lines
    assert "pool = Pool(width=4)" in lines
    assert 'payload_0 = rt.compress("payload_0", pool, pack_0, residual_0, (4, 8))' in lines
    assert not any(line.startswith("from fxcomp.compressors import") for line in lines)


def test_its_error_is_measured_without_its_doing_anything(tmp_path: Path) -> None:
    printed = _in_a_fork(
        "from fxcomp.compressors import parse_compressor\n"
        "from fxcomp.compressors.gaussian_error import gaussian_error\n"
        "print(gaussian_error(parse_compressor('pool(width=16)')))",
        _installed(tmp_path),
        EXAMPLE,
    )
    assert float(printed) == pytest.approx(1 - 1 / 16, abs=0.01)


@pytest.mark.slow
def test_the_example_passes_its_own_tests() -> None:
    _in_a_fork(
        "sys.path.insert(0, sys.path[0] + '/tests')\n"
        "import test_pool\n"
        "test_pool.test_it_conforms()\n"
        "test_pool.test_runs_of_equal_values_lose_nothing()",
        EXAMPLE,
    )


@pytest.fixture(autouse=True)
def _warn_again() -> Iterator[None]:
    catalogue.warn_of_shadowed.cache_clear()
    yield
    catalogue.warn_of_shadowed.cache_clear()


def _announce(monkeypatch: pytest.MonkeyPatch, *values: str, name: str = "thirds") -> None:
    points = [EntryPoint(name, value, catalogue.ENTRY_POINTS) for value in values]
    monkeypatch.setattr(catalogue, "entry_points", lambda group: points)  # noqa: ARG005


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _announce(monkeypatch, "no_such_package.thirds:Thirds")
    with pytest.raises(BadOption) as caught:
        parse_compressor("thirds")
    assert str(caught.value) == (
        "the compressor 'thirds' is announced as no_such_package.thirds:Thirds, which cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_package'.\n  Mend or uninstall that package."
    )


def test_a_package_that_registers_another_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _announce(monkeypatch, "fxcomp.compressors.int8:Int8")
    with pytest.raises(BadOption) as caught:
        parse_compressor("thirds")
    assert str(caught.value) == (
        "the compressor 'thirds' is announced as fxcomp.compressors.int8:Int8, which registers no compressor of that "
        "name.\n  Put @register on the class, and the same name into its facts and the entry point."
    )


def test_announced_names_are_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    _announce(monkeypatch, "no_such_package.thirds:Thirds")
    with pytest.raises(BadOption, match="did you mean 'thirds'"):
        parse_compressor("third")


def test_two_compressors_of_one_name_are_refused() -> None:
    printed = _in_a_fork(
        "from fxcomp.compressors import Int8, register\n"
        "class Other(Int8): pass\n"
        "try:\n    register(Other)\n"
        "except ValueError as error:\n    print(error)"
    )
    assert printed.startswith(
        "there are two compressors named 'int8': fxcomp.compressors.int8.Int8 and __main__.Other.\n"
        "  Rename one of them."
    )


def test_a_package_that_takes_a_name_of_ours_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _announce(monkeypatch, "acme.bytes:Bytes", name="int8")
    with pytest.warns(UserWarning, match="'int8'") as caught:
        assert parse_compressor("int8") == Int8()
    parse_compressor("bf16")  # says nothing more
    assert [str(warning.message) for warning in caught] == [
        "fxcomp: acme.bytes:Bytes is announced as the compressor 'int8', a name that fxcomp.compressors.int8.Int8 has,"
        " which is used. Rename it in that package."
    ]


def test_two_packages_of_one_name_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _announce(monkeypatch, "acme.thirds:Thirds", "other.parts:Thirds")
    with pytest.raises(BadOption) as caught:
        parse_compressor("thirds")
    assert str(caught.value) == (
        "two compressors are announced as 'thirds': acme.thirds:Thirds and other.parts:Thirds.\n"
        "  Rename one of them, or uninstall its package."
    )


# What register says about a class


POOL = (EXAMPLE / "fxcomp_pool" / "pool.py").read_text()
FIELD = "width: int = 8"
PARAMETER = 'parameters=(Parameter("width", "values that share a mean", 1, 65536),),'


def _pool(module: str, *changes: tuple[str, str]) -> ModuleType:
    """The example, with texts replaced, as a module of its own."""
    text = POOL
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    made = ModuleType(module)
    sys.modules[module] = made  # dataclass looks it up
    try:
        exec(compile(text, f"{module}.py", "exec", dont_inherit=True), made.__dict__)
    finally:
        del sys.modules[module]
    return made


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """Take out of the catalogue what a test registered."""
    before = dict(CATALOGUE)
    yield
    CATALOGUE.clear()
    CATALOGUE.update(before)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            [(PARAMETER, "")],
            "the field 'width' must stand once in its facts, or a plan would lose its value.\n"
            "  Add Parameter('width', ...) to parameters, or 'width' to filled_in if bound_to computes it.",
        ),
        (
            [(PARAMETER, PARAMETER + "filled_in=('width',),")],
            "the field 'width' must stand once in its facts, or a plan would lose its value.\n"
            "  Add Parameter('width', ...) to parameters, or 'width' to filled_in if bound_to computes it.",
        ),
        (
            [(PARAMETER, "filled_in=('width',),")],
            "its facts declare that bound_to fills in 'width'.\n  Give it a default, and write bound_to.",
        ),
        (
            [('Parameter("width"', 'Parameter("widht"')],
            "its facts name 'widht', which is no field; there is width.\n  Spell them alike.",
        ),
        (
            [('grain="width"', 'grain="block"')],
            "its facts name 'block' as its grain, which is no parameter that counts values.\n"
            "  Name an int parameter of 1 or more, or override the property grain.",
        ),
        (
            [(FIELD, "width: str = '8'")],
            "the field 'width: str = 8' does not fit its facts: choices are for a str, ranges for numbers.\n"
            "  Write Parameter('width', ..., choices=(...)), or make the field a number.",
        ),
        (
            [(FIELD, "width: int | None = 8")],
            "the field 'width: int | None = 8' has a type that does not travel.\n  Use int, float, bool or str.",
        ),
        (
            [(FIELD, "width: int = field(default_factory=int)"), ("import dataclass", "import dataclass, field")],
            "the field 'width' is not for its place in the constructor, or has a default_factory.\n"
            "  Write width: int, with a plain default or none.",
        ),
        (
            [(FIELD, "state: int = 8"), ("self.width", "self.state"), ('Parameter("width"', 'Parameter("state"')],
            "a field cannot be named 'state', which is taken or not ASCII.\n  Rename it.",
        ),
        (
            [("@register\n@dataclass(frozen=True, slots=True)", "@dataclass(frozen=True, slots=True)\n@register")],
            "it is no dataclass when @register sees it.\n  Put @dataclass(frozen=True, slots=True) below @register.",
        ),
        (
            [("@dataclass(frozen=True, slots=True)\n", "")],
            "it is no dataclass when @register sees it.\n  Put @dataclass(frozen=True, slots=True) below @register.",
        ),
        (
            [("frozen=True, ", "")],
            "its instances can change, but a plan and a graph rely on them.\n  Write @dataclass(frozen=True, ...).",
        ),
        (
            [("facts: ClassVar[Facts]", "facts: Facts")],
            "its facts are a field, one for each instance.\n  Write facts: ClassVar[Facts] = Facts(...).",
        ),
        (
            [("facts: ClassVar[Facts]", "fact: ClassVar[Facts]")],
            "it has no facts.\n  Write facts: ClassVar[Facts] = Facts(...) in the class.",
        ),
        *(
            (
                [('name="pool"', f"name={name!r}")],
                f"the name in its facts, {name!r}, is no name for an op and a variable.\n"
                "  Use letters, digits and _, a letter first, no keyword of Python: acme_pool.",
            )
            for name in ("my-pool", "acme.pool", "2pool", "lambda", "")
        ),
        (
            [('name="pool"', "name='dense'")],
            "its name, 'dense', stands for no compression in a plan.\n  Rename it.",
        ),
        (
            [("def decompress_reference", "def decompres_reference"), ("def payload_elements", "def payload_size")],
            "it lacks decompress_reference, payload_elements.\n  Write the missing members, and check the spelling.",
        ),
        (
            [
                ("bias=Bias.BIASED,", "bias=Bias.BIASED, state='8', agreement=ProposalReduction.MAX,"),
                ("@register\n", "from fxcomp.compressors.facts import ProposalReduction\n@register\n"),
            ],
            "it lacks propose_reference, proposal_elements, state_elements.\n"
            "  Write the missing members, and check the spelling.",
        ),
    ],
)  # fmt: skip
def test_a_class_that_cannot_work_is_explained(changes: list[tuple[str, str]], complaint: str) -> None:
    with pytest.raises(BadOption) as caught:
        _pool("acme.pool", *changes)
    assert str(caught.value) == f"acme.pool.Pool cannot be registered: {complaint}"


@pytest.mark.usefixtures("_forgotten")
def test_annotations_may_be_types_and_text() -> None:
    for number, head in enumerate(("", "from __future__ import annotations\n")):
        name = f"pool_{number}"
        made = _pool(
            f"acme.{name}", ("from __future__ import annotations\n", head), ('name="pool"', f"name={name!r}")
        ).Pool
        assert str(made(width=16)) == f"{name}(width=16)"
        assert parse_compressor(f"{name}(16)") == made(16)
        assert made.compress_op(torch.ones(16), None, (16,), 16)[0].tolist() == [1.0]
        with pytest.raises(BadOption, match=r"width must be a whole number, not 2\.0"):
            made(2.0)


@pytest.mark.usefixtures("_forgotten")
def test_a_class_that_is_registered_again_takes_the_place_of_the_first() -> None:
    names = ('name="pool"', 'name="renewed"')
    first = _pool("acme.renewed", names).Pool
    same = _pool("acme.renewed", names, ("runs - means", "runs - means")).Pool
    other = _pool("acme.renewed", names, (FIELD, f"{FIELD}\n    gain: float = 1.0"),
                  ("parameters=(", 'parameters=(Parameter("gain", "factor", 0, 9),')).Pool  # fmt: skip
    assert str(parse_compressor("renewed(16, gain=2)")) == "renewed(width=16, gain=2.0)"
    assert parse_compressor("renewed") == other()
    for kind, values in ((first, (4,)), (same, (4,)), (other, (4, 1.0))):
        assert kind.compress_op(torch.ones(8), None, (8,), *values)[0].tolist() == [1.0, 1.0]
        assert compressor_of(kind.compress_op, values) == kind(*values)
    assert len({first.compress_op, same.compress_op, other.compress_op}) == 3


@pytest.mark.usefixtures("_forgotten")
def test_another_class_of_the_name_is_refused() -> None:
    _pool("acme.pool", ('name="pool"', 'name="taken"'))
    with pytest.raises(BadOption, match=r"two compressors named 'taken': acme\.pool\.Pool and other\.pool\.Pool\."):
        _pool("other.pool", ('name="pool"', 'name="taken"'))


def test_every_field_of_ours_travels_or_is_filled_in() -> None:
    for kind in CATALOGUE.values():
        travelling = {parameter.name for parameter in kind.facts.parameters}
        assert travelling | set(kind.facts.filled_in) == set(fields_of(kind))
