"""The list of broken kernels goes with the kernels; `make mutants` runs it."""

from __future__ import annotations

import pytest

from tests.cuda.mutants import MUTANTS
from tests.cuda.mutate import CUDA, OPS


def test_there_are_enough_and_each_is_another():
    assert len(MUTANTS) >= 25
    assert len({m.mistake for m in MUTANTS}) == len(MUTANTS)
    assert {m.file for m in MUTANTS} == set(OPS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.mistake)
def test_each_breaks_one_place(mutant):
    text = (CUDA / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.find) == 1
    assert mutant.replace != mutant.find
