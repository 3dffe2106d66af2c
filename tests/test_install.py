"""An sdist is whole, a wheel made of it runs far from the repository, and says what it is."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import fxcomp

ROOT = Path(__file__).parent.parent
HOME = "https://github.com/fxcomp/fxcomp"
NOT_SOURCES = (
    ".git",
    ".hypothesis",
    ".venv*",
    ".*_cache",
    ".nox",
    "__pycache__",
    "*.egg-info",
    "*.so",
    "build",
    "dist",
    "shared",
)
MADE = {"PKG-INFO", "setup.cfg"}

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COLUMNS")}
    words = list(map(str, command))
    return subprocess.run(
        words, cwd=cwd, env={**environment, **variables}, capture_output=True, text=True, timeout=600, check=False
    )


def wheel_of(sdist: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel as pip does for a user, with the setuptools that is here."""
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-w", folder)
    return run(sys.executable, "-m", "pip", "wheel", *options, sdist, cwd=folder, **variables)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources") / "fxcomp"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_SOURCES, "_kernels_not_built.txt"))
    setup = (folder / "setup.py").read_text()
    assert '"-O3"' in setup
    (folder / "setup.py").write_text(setup.replace('"-O3"', '"-O1"'))  # which takes less time to compile
    return folder


@pytest.fixture(scope="module")
def sdist(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    done = run(sys.executable, "-c", build, cwd=sources)
    assert done.returncode == 0, done.stderr
    return folder / f"fxcomp-{fxcomp.__version__}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = wheel_of(sdist, folder, FXCOMP_REQUIRE_KERNELS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = folder.glob("*.whl")
    return found


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(f"fxcomp-{fxcomp.__version__}.dist-info/METADATA"))


def names_in(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def test_an_sdist_has_all_that_the_repository_has(sources: Path, sdist: Path):
    made = {path.relative_to(sources).as_posix() for path in sources.rglob("*") if path.is_file()}
    made = {name for name in made if ".egg-info/" not in name and name not in MADE | {".gitignore", ".gitattributes"}}
    found = {name for name in names_in(sdist) if ".egg-info/" not in name and name not in MADE}
    assert found == made


def test_a_wheel_has_the_package_with_its_types_and_kernels_alone(wheel: Path, sources: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {"fxcomp", f"fxcomp-{fxcomp.__version__}.dist-info"}
    built = {name for name in names if re.fullmatch(r"fxcomp/_kernels\.[\w.]+", name)}
    assert len(built) == 1
    package = {path.relative_to(sources).as_posix() for path in (sources / "fxcomp").rglob("*") if path.is_file()}
    assert "fxcomp/py.typed" in package
    assert {name for name in names if name.startswith("fxcomp/")} - built == package
    assert "-cp311-abi3-" in wheel.name


def test_a_wheel_says_what_it_is_and_where_to_ask(wheel: Path):
    metadata = metadata_of(wheel)
    assert metadata["Version"] == fxcomp.__version__
    assert metadata["Author"]
    classifiers = metadata.get_all("Classifier", [])
    for wanted in ("Typing :: Typed", *(f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15))):
        assert wanted in classifiers
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert urls.keys() >= {"Homepage", "Documentation", "Changelog", "Source", "Issues"}
    assert {"trainer", "report"} <= set(metadata.get_all("Provides-Extra", []))


def test_links_of_the_index_lead_to_files_of_this_version(wheel: Path, sdist: Path):
    text = metadata_of(wheel).get_payload()
    assert isinstance(text, str)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    files = f"{HOME}/blob/v{fxcomp.__version__}/"
    assert [target for target in targets if not re.match("https?://|#", target)] == []
    linked = [target.removeprefix(files).partition("#")[0] for target in targets if target.startswith(files)]
    assert len(linked) > 10
    names = names_in(sdist)
    folders = {parent.as_posix() for name in names for parent in Path(name).parents}
    assert [path for path in linked if path.rstrip("/") not in names | folders] == []


def test_an_installed_wheel_explains_a_job_from_another_folder(wheel: Path, tmp_path: Path):
    place = tmp_path / "environment"
    assert run(sys.executable, "-m", "venv", "--without-pip", place, cwd=tmp_path).returncode == 0
    python = place / "bin" / "python"
    [packages] = place.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # torch and what else is not ours
    options = ("--no-deps", "--no-index", "--quiet")
    done = run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    asked = (
        "import fxcomp, torch; from fxcomp.compressors import kernels;"
        " print(fxcomp.__file__, fxcomp.__version__, kernels.available(), 'fxcomp' in torch._dynamo.list_backends())"
    )
    path, *facts = run(python, "-c", asked, cwd=tmp_path).stdout.split()
    assert Path(path).is_relative_to(packages)
    assert facts == [fxcomp.__version__, "True", "True"]

    shutil.copy(ROOT / "examples" / "mlp.py", tmp_path / "train.py")
    command = place / "bin" / "fxcomp"
    assert run(command, "--version", cwd=tmp_path).stdout == f"fxcomp {fxcomp.__version__}\n"
    done = run(command, "explain", "train.py:job", "--inter", "10mbit", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 hosts x 1 rank, 10mbit between hosts")
    assert "C++ kernels (_kernels" in done.stdout


def test_without_a_compiler_a_wheel_fits_every_machine_or_is_refused(sdist: Path, tmp_path: Path):
    nothing = {"CC": "/nowhere/cc", "CXX": "/nowhere/cxx"}
    refused = wheel_of(sdist, tmp_path, FXCOMP_REQUIRE_KERNELS="1", **nothing)
    assert refused.returncode != 0
    assert "no C++ compiler was found" in refused.stdout + refused.stderr
    assert "FXCOMP_REQUIRE_KERNELS is set: unset it for a build without kernels" in refused.stdout + refused.stderr
    assert list(tmp_path.glob("*.whl")) == []

    done = wheel_of(sdist, tmp_path, **nothing)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name == f"fxcomp-{fxcomp.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert "no C++ compiler was found" in archive.read("fxcomp/_kernels_not_built.txt").decode()
        assert "Root-Is-Purelib: true" in archive.read(f"fxcomp-{fxcomp.__version__}.dist-info/WHEEL").decode()


def test_a_wish_about_kernels_that_cannot_be_read_is_refused(sources: Path):
    done = run(sys.executable, "setup.py", "--version", cwd=sources, FXCOMP_REQUIRE_KERNELS="yes")
    assert done.returncode != 0
    assert "FXCOMP_REQUIRE_KERNELS is 1 (a build without kernels fails) or 0; it is 'yes'" in done.stderr
