"""Checkpoints are plain tensors, of which each rank has its own, and any number of ranks loads them."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pathlib
import pickle
import random
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as formats
from helpers.books import CLUSTERS, SIZES, Books, Job, some_plan
from torch import Tensor

import fxcomp
from fxcomp.compressors import parse_compressor
from fxcomp.errors import BadState
from fxcomp.plan.plan import Bucket, Plan
from fxcomp.plan.strategy import Strategy
from fxcomp.state import checkpoint_folder
from fxcomp.state.checkpoint import NOTHING_YET, read_checkpoint, saved_plan, states_of, to_tensors
from fxcomp.state.checksums import checksum_of_tensor, sealed
from fxcomp.state.fields import GENERATORS, PLAN, SCALE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WORLDS = [CLUSTERS[2, 2], CLUSTERS[1, 3], CLUSTERS[2, 2]]


def trained(compressor: str, steps: int = 2) -> Job:
    plan = Plan((Bucket(tuple(SIZES), tuple(SIZES.values()), Strategy.flat(parse_compressor(compressor))),))
    job, books, generator = Job(CLUSTERS[1, 2], plan), Books.empty(), torch.Generator().manual_seed(0)
    for _ in range(steps):
        books.train(job, generator)
    return job


def tensors(job: Job) -> list[dict[str, Tensor]]:
    return [to_tensors(state) for state in job.saved()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("compressor", ["int4", "powersgd(2)", "topk(0.1)"])
def test_a_state_becomes_plain_tensors_and_comes_back(compressor: str):
    stored = pytest.importorskip("safetensors.torch")
    for state in trained(compressor).saved():
        more = {"a list": [1, 2.5, None, "text"], "a name": {"stored under": torch.ones(2)}}
        flat = to_tensors(sealed(state) | more)
        assert all(type(value) is Tensor and name.startswith(f"rank{state['rank']}.") for name, value in flat.items())
        (back,) = states_of(stored.load(stored.save(flat)))
        assert back.pop("a list") == [1, 2.5, None, "text"]
        assert back.pop("a name")["stored under"].tolist() == [1, 1]
        assert same(back, state)


def test_names_of_ranks_differ_so_that_all_of_them_fit_into_one_file():
    job = trained("int4")
    first, second = tensors(job)
    assert not first.keys() & second.keys()
    assert same(states_of({**second, **first}), job.saved())
    assert same(states_of([second, None, first]), job.saved()[::-1])
    assert states_of({}) == states_of(None) == []


def test_what_is_owed_is_conserved_when_4_ranks_become_3_and_4_again(tmp_path: Path):
    for seed in range(6):
        draw, generator, books = random.Random(seed), torch.Generator().manual_seed(seed), Books.empty()
        before: Job | None = None
        for number, cluster in enumerate(WORLDS):
            job, ranks = Job(cluster, some_plan(draw, cluster)), cluster.world_size
            if before is not None:
                owed = before.owed()
                folder = tmp_path / f"{seed} {number}"
                dcp.save({"step": {k: v for mine in tensors(before) for k, v in mine.items()}}, checkpoint_id=folder)
                parts = [read_checkpoint(folder, rank=rank, ranks=ranks) for rank in range(ranks)]
                assert sum(map(len, parts)) == sum(map(len, tensors(before)))
                job.load([states_of(part) or None for part in parts])
                for name, value in job.owed().items():
                    assert (value - owed[name]).abs().max().item() <= 1e-6
            for _ in range(2):
                books.train(job, generator)
            before = job
        assert before is not None
        assert books.off_by(before.owed()) < 1e-5


def test_the_plan_that_was_followed_is_read_back():
    job = trained("int4")
    flat = to_tensors(sealed({**job.saved()[1], PLAN: job.plan.to_json()}))
    assert saved_plan(flat) == job.plan
    assert saved_plan(tensors(job)[0]) is None
    with pytest.raises(BadState, match=r"(?s)not a saved state: it is a str.*fxcomp.read_checkpoint read from a file"):
        saved_plan("checkpoint.pt")


def test_a_checkpoint_with_something_missing_is_refused():
    flat = tensors(trained("int4"))[1]
    gone = next(name for name in flat if name.endswith("values"))
    for name in (gone, "rank1.about"):
        with pytest.raises(BadState, match=r"checkpoint of rank 1 is not whole: KeyError.*\n  Load all tensors"):
            states_of({key: value for key, value in flat.items() if key != name})
    with pytest.raises(BadState, match=r"not whole: UnicodeDecodeError|not whole: JSONDecodeError"):
        states_of({**flat, "rank1.about": torch.full((3,), 255, dtype=torch.uint8)})


def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(BadState, match=r"holds no whole checkpoint: its .metadata.*\n  Load an earlier one"):
        read_checkpoint(tmp_path)
    dcp.save({"model": {"a": torch.ones(2)}, "fxcomp": tensors(trained("int4"))[0]}, checkpoint_id=tmp_path)
    with pytest.raises(BadState, match=r"no state of a step under 'step'; it holds 'fxcomp', 'model'\.\n  Save"):
        read_checkpoint(tmp_path)
    with pytest.raises(BadState, match="takes the path of a folder; it is a int"):
        read_checkpoint(3)  # type: ignore[arg-type]
    assert states_of(read_checkpoint(tmp_path, "fxcomp"))[0]["rank"] == 0
    assert read_checkpoint(tmp_path, "fxcomp", rank=1, ranks=2) == {}


def test_an_earlier_checkpoint_is_offered_by_its_own_name(tmp_path: Path):
    for number in (50, 100, 150):
        folder = tmp_path / f"step_{number}"
        dcp.save({"step": tensors(trained("int4"))[0]}, checkpoint_id=folder)
        os.utime(folder / ".metadata", (number, number))
    (tmp_path / "latest").symlink_to(tmp_path / "step_100")
    (tmp_path / "step_100" / ".metadata").write_bytes(b"half")
    os.utime(tmp_path / "step_100" / ".metadata", (100, 100))
    for name in ("step_100", "latest"):
        with pytest.raises(BadState, match=r"\n  Load an earlier one on every rank, such as '.*step_50'\."):
            read_checkpoint(tmp_path / name)
    (tmp_path / "step_50" / ".metadata").write_bytes(b"half")
    os.utime(tmp_path / "step_50" / ".metadata", (50, 50))
    with pytest.raises(BadState, match=r"\n  Load an earlier one on every rank\.$"):
        read_checkpoint(tmp_path / "step_50")
    (tmp_path / "step_100" / ".metadata").unlink()
    with pytest.raises(BadState, match=r"holds no whole checkpoint.*\n  Load an earlier one, such as '.*step_150'\."):
        read_checkpoint(tmp_path / "latest")


def test_a_plan_that_a_state_cannot_have_is_refused_with_the_folder(tmp_path: Path):
    state = sealed({**trained("int4").saved()[0], PLAN: {"buckets": []}})
    dcp.save({"step": to_tensors(state)}, checkpoint_id=tmp_path)
    with pytest.raises(
        BadState, match=r"the checkpoint in .* cannot be used: the state is not whole: this is not a plan"
    ):
        read_checkpoint(tmp_path)


def test_states_that_wait_for_a_first_pass_are_in_one_that_is_saved_then():
    waiting = [sealed(state) for state in trained("int4").saved()]
    for saved in ({NOTHING_YET: waiting}, to_tensors({NOTHING_YET: waiting}, rank=0)):
        assert same([dict(state) for state in states_of(saved)], waiting)
    hook = fxcomp.ddp_hook()
    assert states_of(hook.state_dict()) == []
    for given in (waiting, hook.state_dict()):
        hook.load_state_dict(given)
        assert same([dict(state) for state in states_of(hook.state_dict())], waiting if given is waiting else [])
    hook.load_state_dict(mine := {**waiting[0], "a user's": 1})
    for again in (hook.state_dict(), to_tensors(hook.state_dict())):
        assert same(dict(*states_of(again)), mine)
    for value in ([], True, 3, {"a": 1}):
        assert states_of({NOTHING_YET: value}) == []
    with pytest.raises(BadState, match="not a saved state"):
        states_of({NOTHING_YET: [{NOTHING_YET: waiting}]})


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a bit": lambda s: s["residuals"]["a"][0]["values"].view(torch.uint8)[5].bitwise_xor_(1),
    "order": lambda s: s["owed"]["long"].copy_(s["owed"]["long"].flip(0)),
    "a tail": lambda s: s["owed"]["long"][-7:].zero_(),
    "an element type": lambda s: s["owed"].update(long=s["owed"]["long"].view(torch.int32)),
    "a shape": lambda s: s["owed"].update(long=s["owed"]["long"].view(2, -1)),
    "a number": lambda s: s.update(steps=s["steps"] + 1),
    "a missing key": lambda s: s.pop("owed"),
    "a new parameter": lambda s: s["owed"].update(new=torch.ones(1)),
    "no checksum": lambda s: s.pop("checksum"),
    "another checksum": lambda s: s.update(checksum=0),
    "no data": lambda s: s.update(plan={1, 2}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_was_changed_is_refused(change: str):
    state = trained("int4").saved()[1]
    state = sealed({**state, "owed": {"long": torch.arange(20_002.0)}})
    assert states_of([{**state, "a user's": 1}])[0]["owed"] is state["owed"]
    CHANGES[change](state)
    for given in (state, [state]):
        with pytest.raises(BadState, match=r"state of rank 1 is damaged, was edited.*\n  Load an earlier one"):
            states_of(given)


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("elements", [0, 1, 2, 8191, 8192, 8193, 100_000])
def test_a_checksum_is_of_values_and_not_of_places(elements: int, offset: int):
    value = torch.randint(256, (offset + elements,), dtype=torch.uint8)[offset:]
    known = checksum_of_tensor(value)
    assert checksum_of_tensor(value.clone()) == checksum_of_tensor(torch.stack([value, value], 1)[:, 1]) == known
    for place in {0, elements // 2, elements - 1} if elements else ():
        changed = value.clone()
        changed[place] ^= 1
        assert checksum_of_tensor(changed) != known


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**100])
def test_a_state_of_a_gpu_and_of_any_scale_is_read(scale: float):
    """A GPU's generator has a state of 16 bytes, and a scaler may double its scale for days."""
    device = {"cpu": torch.get_rng_state(), "device": torch.zeros(16, dtype=torch.uint8)}
    state = sealed({**trained("int4").saved()[1], GENERATORS: device, SCALE: scale})
    assert states_of(to_tensors(state))[0][SCALE] == scale


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("hostile"),)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no metadata": lambda folder: (folder / ".metadata").unlink(),
    "empty metadata": lambda folder: (folder / ".metadata").write_bytes(b""),
    "half the metadata": lambda folder: truncated(folder / ".metadata"),
    "metadata of another kind": lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(torch.Size([1]))),
    "metadata that call a function": lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Hostile())),
    "half the data": lambda folder: truncated(folder / "__0_0.distcp"),
    "no data": lambda folder: (folder / "__0_0.distcp").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_and_an_earlier_one_offered(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    mine = tensors(trained("int4"))[0]
    for step in (8, 10, 20):
        dcp.save({"step": mine}, checkpoint_id=f"step-{step}")
    assert read_checkpoint("step-20").keys() == mine.keys()
    DAMAGES[damage](Path("step-20"))
    with pytest.raises(BadState, match=r"'step-20' (cannot be used|holds no whole).*\n  Load an earlier .*step-10'\."):
        read_checkpoint("step-20")
    assert not Path("hostile").exists()


def in_a_folder(folder: Path) -> dict[str, Tensor]:
    return checkpoint_folder.read(folder, "step", lambda _: True)[0]


WEIGHT = torch.arange(1000.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a checkpoint of {"step": {"a": WEIGHT}}."""
    dcp.save({"step": {"a": WEIGHT}}, checkpoint_id=tmp_path / "step-1")
    return tmp_path / "step-1"


ENCODING = formats._MEM_FORMAT_ENCODING  # pyright: ignore[reportPrivateUsage]


def test_a_folder_changes_no_object_of_torch(folder: Path, monkeypatch: pytest.MonkeyPatch):
    contiguous = ENCODING.TORCH_CONTIGUOUS_FORMAT
    monkeypatch.setitem(vars(contiguous), "_value_", 0)  # restores it if the test fails
    encoding = f"c{formats.__name__}\n{ENCODING.__name__}\n".encode()
    for named in (encoding + b"K\x00\x85R", encoding, b"ctorch\nfloat32\n"):
        (folder / ".metadata").write_bytes(b"\x80\x02" + named + b"}X\x07\x00\x00\x00_value_Kcsb.")
        with pytest.raises(BadState, match="__dict__"):
            in_a_folder(folder)
    assert contiguous.value == 0
    dcp.save({"step": {"a": WEIGHT}}, checkpoint_id=folder.with_name("later"))
    assert torch.equal(in_a_folder(folder.with_name("later"))["a"], WEIGHT)


def replace_tensor(folder: Path, parts: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> None:
    """Append a tensor's archive to the file, with some `parts` of it replaced, and let the metadata name it."""
    found: Any = pickle.loads((folder / ".metadata").read_bytes())
    (at,) = found.storage_data.values()
    archive = io.BytesIO()
    whole = (folder / at.relative_path).read_bytes()
    old = zipfile.ZipFile(io.BytesIO(whole[at.offset : at.offset + at.length]))
    with zipfile.ZipFile(archive, "w", kind) as new:
        for name in old.namelist():
            new.writestr(name, parts.get(name, old.read(name)))
    at.offset, at.length = len(whole), len(archive.getvalue())
    (folder / at.relative_path).write_bytes(whole + archive.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(found))


CLAIMED = 300_000_000
CLAIMS = {
    "a byte array": b"\x80\x05\x96" + CLAIMED.to_bytes(8, "little") + b".",
    "bytes": b"\x80\x04\x8e" + CLAIMED.to_bytes(8, "little") + b".",
    "a text": b"\x80\x04\x8d" + CLAIMED.to_bytes(8, "little") + b".",
    "a short text": b"\x80\x04X" + CLAIMED.to_bytes(4, "little") + b".",
    "a number": b"\x80\x04\x8b" + CLAIMED.to_bytes(4, "little") + b".",
    "a frame": b"\x80\x04\x95" + CLAIMED.to_bytes(8, "little") + b".",
    "a call": b"\x80\x02cbuiltins\nbytearray\nJ" + CLAIMED.to_bytes(4, "little") + b"\x85R.",
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_folder_takes_no_memory_that_it_only_claims(claim: str, folder: Path):
    replace_tensor(folder, {"archive/data.pkl": CLAIMS[claim]})
    for _ in ("tensor", "metadata"):
        tracemalloc.start()
        with pytest.raises(BadState):
            in_a_folder(folder)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 30_000_000
        (folder / ".metadata").write_bytes(CLAIMS[claim])


@pytest.mark.parametrize("word", ["properties", "state_dict_metadata", "_StorageInfo", "size", "fqn"])
def test_a_word_of_the_metadata_that_was_changed_loses_no_tensor(word: str, folder: Path):
    """The only tensor of a rank is then refused, not left out."""
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(whole.replace(word.encode(), word[:-1].encode() + b"?"))
    with contextlib.suppress(BadState):
        assert torch.equal(in_a_folder(folder)["a"], WEIGHT)


@pytest.mark.parametrize("path", ["a\0b", "loop/a"])
def test_a_path_that_no_folder_has_is_refused(path: str, tmp_path: Path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(BadState, match="holds no whole checkpoint"):
        read_checkpoint(tmp_path / path)


def test_a_compressed_tensor_in_a_folder_is_refused(folder: Path):
    replace_tensor(folder, {})
    assert torch.equal(in_a_folder(folder)["a"], WEIGHT)
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        replace_tensor(folder, {"archive/version": b"3" * 100_000}, kind)
        with pytest.raises(BadState, match=r"__0_0\.distcp has a compressed tensor"):
            in_a_folder(folder)


DEEP: Any = functools.reduce(lambda inner, _: (inner, inner), range(20), "a")


def repeated(found: Any) -> None:
    index, at = next(iter(found.storage_data.items()))
    found.storage_data |= {formats.MetadataIndex(index.fqn, index.offset + index.offset): at}


FORGERIES: dict[str, tuple[Callable[[Any], object], str]] = {
    "key": (lambda found: found.planner_data.update({DEEP: 1}), "its .metadata has a list as a key"),
    "number": (lambda found: found.planner_data.update({2**61 - 1: 1}), "its .metadata has a int as a key"),
    "set": (lambda found: vars(found).update(planner_data={DEEP}), "its .metadata or a tensor has an opcode"),
    "frozen set": (lambda found: vars(found).update(planner_data=frozenset((DEEP,))), "has an opcode"),
    "path": (lambda found: vars(next(iter(found.storage_data.values()))).update(relative_path=DEEP), "unhashable"),
    "name": (lambda found: vars(next(iter(found.storage_data))).update(fqn=DEEP), "unhashable"),
    "names": (lambda found: vars(found).update(state_dict_metadata={DEEP: 1}), "its .metadata has a list as a key"),
    "format": (
        lambda found: vars(found.state_dict_metadata["step.a"]).update(properties=DEEP),
        "object has no attribute 'state'",
    ),
    "a slice for each": (repeated, "its files are shorter than the .metadata needs"),
    "size": (
        lambda found: vars(found.state_dict_metadata["step.a"]).update(size=torch.Size([2**50])),
        "its files are shorter than the .metadata needs",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_metadata_take_neither_time_nor_memory(forgery: str, folder: Path):
    """The values are nested tuples whose hash and text take 2^20 steps, which a few more levels would make hours."""
    change, message = FORGERIES[forgery]
    found = pickle.loads((folder / ".metadata").read_bytes())
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(BadState, match=message) as error:
        in_a_folder(folder)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_folder_of_another_python_is_read(protocol: int, folder: Path, monkeypatch: pytest.MonkeyPatch):
    found = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(found, protocol))
    assert torch.equal(in_a_folder(folder)["a"], WEIGHT)
    monkeypatch.setattr(ENCODING, "__reduce_ex__", lambda self, _: (getattr, (ENCODING, self.name)))  # until 3.11.3
    monkeypatch.setattr(type(folder), "__module__", "pathlib._local")  # 3.13
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    written = pickle.dumps(found, protocol)
    assert b"getattr" in written
    assert b"pathlib._local" in written
    (folder / ".metadata").write_bytes(written)
    assert torch.equal(in_a_folder(folder)["a"], WEIGHT)


def test_only_tensors_are_written(tmp_path: Path):
    dcp.save({"step": tensors(trained("powersgd(2)"))[0]}, checkpoint_id=tmp_path)
    kept = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {type(about).__name__ for about in kept.values()} == {"TensorStorageMetadata"}
    file = io.BytesIO()
    torch.save(tensors(trained("powersgd(2)"))[0], file)
    file.seek(0)
    assert torch.load(file, weights_only=True)
