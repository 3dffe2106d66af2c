"""The training text: the same everywhere and every time, and validation shares no file with training."""

from pathlib import Path

import pytest
import torch

from fxcomp.commands.demo.gpt import draw_batch, load_text
from fxcomp.errors import BadJob


def test_the_split_is_the_same_every_time():
    first, second = load_text(1_000_000), load_text(1_000_000)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)


def test_training_and_validation_both_have_text():
    text = load_text(1_000_000)
    assert len(text.validation) > 10_000
    assert len(text.train) > len(text.validation)


def test_every_tenth_file_by_name_is_validation_and_the_limit_holds(tmp_path: Path):
    for index in reversed(range(25)):
        (tmp_path / f"m{index:02}.py").write_bytes(b"%02d" % index * 50)
    text = load_text(2_050, tmp_path)
    assert bytes(text.train.tolist()).split(b"\n") == [b"%02d" % k * 50 for k in range(20) if k not in (9, 19)] + [
        b"20" * 25
    ]
    assert bytes(text.validation.tolist()).split(b"\n") == [b"09" * 50, b"19" * 50]


def test_batches_depend_on_step_rank_and_seed_alone():
    tokens = load_text(1_000_000).train
    inputs, targets = draw_batch(tokens, step=3, rank=1)
    again, _ = draw_batch(tokens, step=3, rank=1)
    assert torch.equal(inputs, again)
    assert inputs.shape == targets.shape == (8, 128)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for other in ({"step": 4, "rank": 1}, {"step": 3, "rank": 0}, {"step": 3, "rank": 1, "seed": 1}):
        assert not torch.equal(inputs, draw_batch(tokens, **other)[0])


def test_a_folder_without_sources_is_refused(tmp_path: Path):
    with pytest.raises(BadJob, match="fewer than 10 Python files"):
        load_text(folder=tmp_path)
