"""Loading a job from a file, and each way in which that goes wrong."""

from pathlib import Path

import pytest
import torch

from fxcomp.commands.demo.gpt import GPT, GPTConfig, gpt_job
from fxcomp.errors import BadOption
from fxcomp.frontends.job import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_small_example_loads_and_its_loss_is_a_number():
    job = load_job(f"{EXAMPLES / 'mlp.py'}:job")
    assert job.loss_fn(job.model, job.batch).ndim == 0
    assert job.max_grad_norm is None


def test_the_function_may_be_left_out():
    assert load_job(str(EXAMPLES / "mlp.py")).batch[0].shape == (32, 64)


def test_each_load_brings_its_own_model_with_the_same_weights():
    first, second = (load_job(f"{EXAMPLES / 'mlp.py'}:job") for _ in range(2))
    assert first.model is not second.model
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_job_without_batches_repeats_its_example(tmp_path: Path):
    (tmp_path / "fixed.py").write_text(
        "import torch\nfrom torch import nn\nfrom fxcomp.frontends.job import Job\n"
        "def job():\n"
        "    model = nn.Linear(2, 1)\n"
        "    return Job(model, lambda m, b: m(b).sum(), torch.optim.SGD(model.parameters()), torch.ones(1, 2))\n"
    )
    job = load_job(f"{tmp_path / 'fixed.py'}:job")
    assert job.batch_at(0, 0) is job.batch_at(7, 1)


def test_a_missing_file_is_named():
    with pytest.raises(BadOption, match=r"there is no file 'nowhere\.py'"):
        load_job("nowhere.py:job")


def test_a_missing_function_is_named(tmp_path: Path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(BadOption, match=r"empty\.py has no function 'train'"):
        load_job(f"{tmp_path / 'empty.py'}:train")


def test_a_function_that_returns_something_else_is_refused(tmp_path: Path):
    (tmp_path / "wrong.py").write_text("def job():\n    return 3\n")
    with pytest.raises(BadOption, match=r"returned int, not a Job"):
        load_job(f"{tmp_path / 'wrong.py'}:job")


def test_a_file_that_is_not_python_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(BadOption, match="not a Python file"):
        load_job(f"{tmp_path / 'notes.txt'}:job")


def test_the_gpt_has_the_size_it_says_and_learns_on_a_batch():
    assert 14.2e6 < sum(p.numel() for p in GPT().parameters()) < 14.5e6
    job = gpt_job(GPTConfig(layers=1, heads=2, width=32, context=16))
    before = job.loss_fn(job.model, job.batch)
    for _ in range(20):
        job.optimizer.zero_grad()
        job.loss_fn(job.model, job.batch).backward()
        job.optimizer.step()
    assert job.loss_fn(job.model, job.batch) < before
