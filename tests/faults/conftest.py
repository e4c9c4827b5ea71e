"""Good checkpoints, each made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .inject import Bases


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"), tiny_model)
