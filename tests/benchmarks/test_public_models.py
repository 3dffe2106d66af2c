"""Models of a public library train as eager, where the library is installed (`pip install -e '.[models]'`)."""

import pytest

pytest.importorskip("transformers")

from public_models import train  # benchmarks are on the path


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("family", ["mixtral"])
def test_a_public_model_trains_as_eager(family: str):
    record = train(family, 0, 1)
    assert (record.result, record.detail) == ("identical", "")
