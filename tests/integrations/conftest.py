"""Every test here starts and ends with the integrations switched off."""

import importlib
import importlib.util
import warnings

import pytest

from tilecrew.integrations import fla as fla_integration
from tilecrew.integrations import transformers as transformers_integration


@pytest.fixture(scope="session", autouse=True)
def imported_fla() -> None:
    """flash-linear-attention warns on a machine without a GPU when it is imported; tests turn warnings to errors."""
    if importlib.util.find_spec("fla") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("fla.layers")


@pytest.fixture(autouse=True)
def switched_off():
    transformers_integration.disable()
    fla_integration.disable()
    yield
    transformers_integration.disable()
    fla_integration.disable()
