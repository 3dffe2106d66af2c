"""Files beside Lightning's checkpoints are whole and of one step, wherever they lie; one fit goes on from another."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from helpers.recipes import under_torchrun

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

BEGIN = """
import functools, logging, os, shutil, sys, warnings
from pathlib import Path

import torch
import torch.distributed as dist
import with_lightning
from lightning.pytorch import Trainer

import fxcomp
from fxcomp.frontends.lightning import FxcompStrategy

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
os.chdir(sys.argv[1])
COMPRESS = "powersgd(2)"


class Regression(with_lightning.Regression):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def say(*words):
    with open(f"{sys.argv[2]}/{dist.get_rank()}", "a") as file:
        print(dist.get_rank(), *words, file=file)


def trainer_of(steps, **options):
    gloo = dict(process_group_backend="gloo")
    strategy = FxcompStrategy(compress=COMPRESS, **gloo)
    return Trainer(
        accelerator="cpu", devices=2, max_steps=steps, max_epochs=-1, strategy=strategy, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **options,
    )


def fit(module, steps, checkpoint=None, trainer=None, **options):
    trainer = trainer or trainer_of(steps, **options)
    trainer.fit_loop.epoch_loop.max_steps = steps
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, with_lightning.batches(), ckpt_path=checkpoint)
    for each in caught:
        if "fxcomp:" in str(each.message):
            say("warning", str(each.message))
    return trainer


def new():
    torch.manual_seed(0)
    return Regression()


def flat(module):
    return torch.cat([each.detach().flatten() for each in module.parameters()])


def equal_on_ranks(module):
    everywhere = [torch.empty_like(flat(module)) for _ in range(2)]
    dist.all_gather(everywhere, flat(module))
    return torch.equal(*everywhere)


def owed(trainer):
    slices = [each for pieces in trainer.strategy.hook.state_dict()["residuals"].values() for each in pieces]
    return sum(float(each["values"].norm()) for each in slices)
"""


def said(script: str, folder: Path) -> list[str]:
    """Run it in a folder; return what ranks say, in the order of ranks."""
    work, words = folder / "work", folder / "said"
    work.mkdir()
    words.mkdir()
    under_torchrun(BEGIN + script, work, words)
    return [line for rank in range(2) for line in (words / str(rank)).read_text().splitlines()]


ELSEWHERE = """
import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class Bucket(DirFileSystem):
    protocol = "bucket"

    def __init__(self, **_):
        super().__init__(path=sys.argv[1] + "/bucket", fs=LocalFileSystem())

    def makedirs(self, path, exist_ok=False):
        super().makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def open(self, path, *arguments, **named):
        return super().open(self._strip_protocol(path), *arguments, **named)

    def exists(self, path):
        return super().exists(self._strip_protocol(path))

    def rm(self, path, *arguments, **named):
        super().rm(self._strip_protocol(path), *arguments, **named)


fsspec.register_implementation("bucket", Bucket)
os.makedirs("bucket", exist_ok=True)
url = "bucket://runs/a.ckpt"
trainer = fit(new(), 16)
trainer.save_checkpoint(url)
trainer.save_checkpoint("here/a.ckpt")
here, elsewhere = new(), new()
fit(here, 24, "here/a.ckpt")
fit(elsewhere, 24, url)
say("the same", torch.equal(flat(here), flat(elsewhere)))
dist.barrier()
if dist.get_rank() == 0:
    say("written", *sorted(str(each) for each in Path("bucket").rglob("*") if each.is_file()))
    shutil.rmtree("here")
dist.barrier()
trainer.strategy.remove_checkpoint(url)
dist.barrier()
say("left", *(str(each) for each in Path(".").rglob("*") if each.is_file()))
dist.barrier()
trainer.save_checkpoint("bare.ckpt")
dist.barrier()
os.unlink(f"bare.ckpt.fxcomp-rank{dist.get_rank()}.pt")
dist.barrier()
bare = new()
fit(bare, 24, "bare.ckpt")
say("without", torch.equal(flat(here), flat(bare)))
"""


@pytest.mark.slow
def test_what_a_rank_keeps_lies_beside_a_checkpoint_elsewhere(tmp_path: Path):
    assert said(ELSEWHERE, tmp_path) == [
        "0 the same True",
        "0 written bucket/runs/a.ckpt bucket/runs/a.ckpt.fxcomp-rank0.pt bucket/runs/a.ckpt.fxcomp-rank1.pt",
        "0 left",
        "0 warning fxcomp: 'bare.ckpt' has no state next to it: earlier residuals are lost, once.",
        "0 without False",
        "1 the same True",
        "1 left",
        "1 without False",
    ]


OF_ANOTHER_STEP = """
trainer = fit(new(), 8)
trainer.save_checkpoint("a.ckpt")
mine = f"a.ckpt.fxcomp-rank{dist.get_rank()}.pt"
shutil.copy(mine, f"old{dist.get_rank()}")
trainer = fit(new(), 16)
trainer.save_checkpoint("a.ckpt")
if dist.get_rank() == 1:
    shutil.copy("old1", mine)
dist.barrier()
module = new()
trainer = fit(module, 20, "a.ckpt")
say("went on", trainer.global_step, equal_on_ranks(module))
dist.barrier()
if dist.get_rank() == 1:
    os.unlink(mine)
dist.barrier()
trainer = fit(new(), 20, "a.ckpt")
say("without", trainer.global_step)
"""


@pytest.mark.slow
def test_a_file_of_another_step_is_not_used_and_a_missing_one_is_named(tmp_path: Path):
    first, *others = said(OF_ANOTHER_STEP, tmp_path)
    assert first.startswith("0 warning fxcomp: no rank loads the state of rank 1 of 2:")
    assert others[0] == "0 went on 20 True"
    assert others[1].startswith("0 warning fxcomp: no rank loads the state of rank 1 of 2:")
    assert "put the missing files (fxcomp-rank1 in a name) back where the others are" in others[1]
    assert others[2] == "0 without 20"
    assert others[3].startswith(
        "1 warning fxcomp: 'a.ckpt' is of step 16, and rank 1's file next to it of step 8: a job ended while it saved."
    )
    assert others[4:] == ["1 went on 20 True", "1 without 20"]


TORN = """
fit(new(), 8).save_checkpoint("a.ckpt")
dist.barrier()
if dist.get_rank() == 1:
    os.truncate("a.ckpt.fxcomp-rank1.pt", os.path.getsize("a.ckpt.fxcomp-rank1.pt") - 1)
dist.barrier()
try:
    fit(new(), 16, "a.ckpt")
except fxcomp.FxcompError as error:
    say(type(error).__name__, str(error).replace(os.getcwd() + "/", "").replace(chr(10), ""))
"""


@pytest.mark.slow
def test_a_torn_file_of_one_rank_is_named_on_every_rank(tmp_path: Path):
    other, reader = said(TORN, tmp_path)
    text = reader.removeprefix("1 BadState ")
    assert text.startswith("'a.ckpt.fxcomp-rank1.pt', the file of rank 1, cannot be used: RuntimeError: Pytorch")
    assert text.endswith(".  Load an earlier one on every rank.")
    assert other == f"0 PeerFailed rank 1 failed in reading the ranks' files: BadState: {text}"


AGAIN = """
loads = []


def counted(load, self, state):
    loads.append(state)
    load(self, state)


load = fxcomp.DdpHook.load_state_dict
fxcomp.DdpHook.load_state_dict = functools.partialmethod(functools.partial(counted, load))
straight = new()
fit(straight, 32)
module = new()
trainer = fit(module, 16)
say(owed(trainer) > 0, len(loads))
fit(module, 32, trainer=trainer)
say(torch.equal(flat(straight), flat(module)), len(loads))
fit(new(), 33, trainer=trainer)
say(trainer.global_step, len(loads))
"""


@pytest.mark.slow
def test_a_second_fit_of_a_module_begins_in_the_state_of_the_first(tmp_path: Path):
    """SGD has no state that the library drops: parameters are those of one fit. Another module begins without."""
    assert said(AGAIN, tmp_path) == [f"{rank} {words}" for rank in (0, 1) for words in ("True 0", "True 1", "33 1")]


OPTIONS = """
for name, options in {
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 1.0},
    "bf16": {"precision": "bf16-mixed"},
    "all": {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "precision": "bf16-mixed"},
}.items():
    module = new()
    before = flat(module)
    trainer = fit(module, 6, **options)
    say(name, trainer.global_step, equal_on_ranks(module), not torch.equal(before, flat(module)))
fit(new(), 21).save_checkpoint("a.ckpt")  # an epoch has 16
module = new()
trainer = fit(module, 40, "a.ckpt")
say("resumed", trainer.global_step, equal_on_ranks(module), owed(trainer) > 0)
"""


@pytest.mark.slow
def test_a_trainers_options_train_equal_replicas(tmp_path: Path):
    trained = [f"{name} 6 True True" for name in ("accumulation", "clipping", "bf16", "all")]
    lines = [f"{rank} {words}" for rank in (0, 1) for words in (*trained, "resumed 40 True True")]
    assert said(OPTIONS, tmp_path) == lines


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fxcomp.frontends.lightning import _Files

    files = _Files(tmp_path / "a.ckpt")
    files.write(0, {"values": torch.ones(3)})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            files.write(0, {"values": torch.zeros(3)})
    assert torch.equal(files.read(0)["values"], torch.ones(3))
    assert list(files.of_ranks()) == [0], "what is not whole is nobody's"
    files.write(0, {"values": torch.zeros(3)})
    assert torch.equal(files.read(0)["values"], torch.zeros(3))
    files.write(3, {"values": torch.zeros(3)})
    files.remove(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt.fxcomp-rank0.pt"]


def test_nothing_lies_beside_an_address_of_the_web_or_in_a_folder_that_is_not_there(tmp_path: Path):
    from fxcomp.frontends.lightning import _Files

    assert _Files("https://example.org/runs/a.ckpt").of_ranks() == {}
    assert _Files(tmp_path / "no folder" / "a.ckpt").of_ranks() == {}
    assert _Files("memory://runs/a.ckpt").of_ranks() == {}
