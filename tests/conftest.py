"""Fixtures that every test may use. Tests need no network: `ddtree model fetch` has put the default model in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from runtime.models import Checkpoint
    from runtime.tokenizer import ChatTokenizer

KEPT_VARIABLES = ("DDTREE_CACHE_DIR", "DDTREE_MODEL_WHEEL")


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_this_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the operator's own configuration file and `DDTREE_*` variables from all tests and their children."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in list(os.environ):
            if variable.startswith("DDTREE_") and variable not in KEPT_VARIABLES:
                patch.delenv(variable)
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config-home")))
        yield


@pytest.fixture(scope="session")
def default_checkpoint() -> Checkpoint:
    """The default model as opened from the cache; an error that names `ddtree model fetch` if it is not there."""
    from runtime.models import open_checkpoint

    return open_checkpoint()


@pytest.fixture(scope="session")
def default_tokenizer(default_checkpoint: Checkpoint) -> ChatTokenizer:
    return default_checkpoint.load_tokenizer()
