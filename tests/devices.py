"""A fixture that runs a test on the CPU and on a GPU where there is one: `device = devices.device` in a test module."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
