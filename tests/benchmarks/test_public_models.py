"""Models of a public library train as eager, where the library is installed (`pip install -e '.[models]'`)."""

import pytest

pytest.importorskip("transformers")

from public_training import Way, train  # benchmarks are on the path


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("family", ["mixtral"])
def test_a_public_model_trains_as_eager(family: str):
    record = train(family, 0, 1)
    assert (record.result, record.detail) == ("identical", "")


@pytest.mark.filterwarnings("ignore")
def test_the_librarys_switch_for_checkpointing_is_followed_with_dropout():
    record = train("gpt2", 0, 1, Way(checkpoints=True))
    assert (record.result, record.detail) == ("identical", "")
