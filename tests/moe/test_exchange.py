"""The kernels that move rows between ranks, under Triton's interpreter."""

import pytest

from tests.interpreter import run_interpreted


@pytest.mark.interpreter
@pytest.mark.slow
def test_under_the_interpreter():
    pytest.importorskip("triton")
    run_interpreted("moe/interpreted_exchange.py")
