"""A compressor from another package: found by its name, checked like ours, and explained when it is broken."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fxcomp.compressors import BadCompressor, catalogue, parse_compressor

EXAMPLE = Path(__file__).parent.parent / "examples" / "plugin"


def _python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def _installed(folder: Path) -> Path:
    """What an installer leaves behind of the example: its announcement."""
    announcement = folder / "fxcomp_pool-0.1.0.dist-info"
    announcement.mkdir()
    (announcement / "METADATA").write_text("Metadata-Version: 2.1\nName: fxcomp-pool\nVersion: 0.1.0\n")
    _, _, section = (EXAMPLE / "pyproject.toml").read_text().partition('[project.entry-points."fxcomp.compressors"]')
    (announcement / "entry_points.txt").write_text("[fxcomp.compressors]" + section.replace('"', ""))
    return folder


def test_an_installed_compressor_is_found_by_name_and_travels_in_a_plan(tmp_path: Path) -> None:
    done = _python(
        "from fxcomp.strategy import Strategy\n"
        "text = 'compress(pool(width=16))@gpu > all_reduce@world > decompress@gpu'\n"
        "assert str(Strategy.parse(text)) == text\n"
        "print(type(Strategy.parse(text).compressor).__module__)",
        _installed(tmp_path),
        EXAMPLE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fxcomp_pool.pool\n"


def test_an_emitted_step_imports_it_from_its_own_package(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    done = _python(
        "from graphs import TWO, one_bucket\n"
        "from stages import compressed\n"
        "from fxcomp.codegen.emit import emit\n"
        "from fxcomp.passes.remove_dead_nodes import remove_dead_nodes\n"
        "from fxcomp.passes.thread_state import thread_state\n"
        "plan = one_bucket('compress(pool(width=4))@gpu > all_reduce@world > decompress@gpu')\n"
        "source = emit(remove_dead_nodes(thread_state(compressed(plan, TWO))))\n"
        "compile(source, 'step', 'exec')\n"
        "print(source)",
        _installed(tmp_path),
        EXAMPLE,
        tests,
        tests / "passes",
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "from fxcomp_pool.pool import Pool" in lines
    assert "pool = Pool(width=4)" in lines
    assert 'payload_0 = rt.compress("payload_0", pool, pack_0, residual_0, (4, 8))' in lines
    assert not any(line.startswith("from fxcomp.compressors import") for line in lines)


def test_its_error_is_measured_without_its_doing_anything(tmp_path: Path) -> None:
    done = _python(
        "from fxcomp.compressors import parse_compressor\n"
        "from fxcomp.compressors.gaussian_error import gaussian_error\n"
        "print(gaussian_error(parse_compressor('pool(width=16)')))",
        _installed(tmp_path),
        EXAMPLE,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(1 - 1 / 16, abs=0.01)


def test_the_example_passes_its_own_tests() -> None:
    done = _python(
        "sys.path.insert(0, sys.path[0] + '/tests')\n"
        "import test_pool\n"
        "test_pool.test_it_conforms()\n"
        "test_pool.test_runs_of_equal_values_lose_nothing()",
        EXAMPLE,
    )
    assert done.returncode == 0, done.stderr


def _announce(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("thirds", value, catalogue.ENTRY_POINTS)
    monkeypatch.setattr(catalogue, "entry_points", lambda group: [point])  # noqa: ARG005


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _announce(monkeypatch, "no_such_package.thirds:Thirds")
    with pytest.raises(BadCompressor) as caught:
        parse_compressor("thirds")
    assert str(caught.value) == (
        "the compressor 'thirds' is announced as no_such_package.thirds:Thirds, which cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_package'.\n  Mend or uninstall that package."
    )


def test_a_package_that_registers_another_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _announce(monkeypatch, "fxcomp.compressors.int8:Int8")
    with pytest.raises(BadCompressor) as caught:
        parse_compressor("thirds")
    assert str(caught.value) == (
        "the compressor 'thirds' is announced as fxcomp.compressors.int8:Int8, which registers no compressor of that "
        "name.\n  Put @register on the class, and the same name into its facts and the entry point."
    )


def test_announced_names_are_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    _announce(monkeypatch, "no_such_package.thirds:Thirds")
    with pytest.raises(BadCompressor, match="did you mean 'thirds'"):
        parse_compressor("third")


def test_two_compressors_of_one_name_are_refused() -> None:
    done = _python(
        "from fxcomp.compressors import Int8, register\n"
        "class Other(Int8): pass\n"
        "try:\n    register(Other)\n"
        "except ValueError as error:\n    print(error)"
    )
    assert done.stdout.startswith(
        "there are two compressors named 'int8': fxcomp.compressors.int8.Int8 and __main__.Other.\n"
        "  Rename one of them."
    ), done.stderr
