"""The claims of Megatron-Core's tests notice when the communication is broken; see `tests/test_mutations.py`.

Layer: pytest in a process of its own for each file of claims.
"""

from __future__ import annotations

import pytest

from tests.test_mutations import CLAIMS, assert_no_mutation_survives


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("file", [file for file in CLAIMS if file.startswith("tests/megatron/")])
def test_no_mutation_survives(file: str) -> None:
    assert_no_mutation_survives(file)
