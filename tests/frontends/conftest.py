"""Keep what one test compiled from the next."""

import pytest
import torch


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
