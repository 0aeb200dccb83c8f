"""Every test here needs the compiled kernels; a machine without a C compiler skips them."""

from __future__ import annotations

import pytest

from posttrain.kernels.library import library


@pytest.fixture(autouse=True)
def compiled() -> None:
    if library().functions is None:
        pytest.skip(f"no compiled kernels: {library().problem}")
