"""A small sample of `python tests/fuzz/inputs.py`; that profiles, configs and commands are tried is in their tests."""

import pytest
from inputs import run_batch


@pytest.mark.parametrize("kind", ["layout", "einsum", "checkpoint"])
def test_texts_and_files_are_taken_or_refused(kind, tmp_path):
    failure = run_batch(kind, 10**6, 100, tmp_path)
    assert not failure, failure
