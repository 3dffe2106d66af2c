"""Optimizers, precisions, accumulation, clipping and plans work with each other, or are refused by name.

Dense cells are those of eager DDP: to the bit where sums have one order, else within stated bounds. Compressed ones
keep replicas the same to the bit, and the loss within 1 %.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import astuple, replace

import pytest
from helpers.matrix import Cell, Found, pairs, product, train_all, verdict
from helpers.matrix_page import BEGIN, END, PAGE, RANKS, RECORDS, kept, section
from helpers.ranks import run_ranks


def assert_cells_work(cells: list[Cell]) -> None:
    ranks = cells[0].ranks
    everyone = run_ranks(ranks, train_all, cells, timeout_s=1800.0)
    verdicts = {str(cell): verdict(cell, found) for cell, *found in zip(cells, *everyone, strict=True)}
    assert not {name: said for name, said in verdicts.items() if said.startswith("fails")}


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (1, 2))])
def test_what_meets_in_pairs_works_together(first: int):
    assert_cells_work(pairs(2)[first::3])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_part_of_the_product_works(ranks: int):
    """The page's command runs all of it, which takes too long for a test."""
    assert_cells_work(product(2)[::8] if ranks == 2 else pairs(ranks))


ONE_ORDER = Cell("AdamW", "fp32", 1, "none", "dense", 2)
OTHER_ORDER = Cell("AdamW", "fp32", 3, "none", "dense", 2)
COMPRESSED = Cell("AdamW", "fp32", 3, "none", "int8", 2)
GOOD = Found(apart=0.0, missed=0.0, loss=1.5, eager_loss=1.5, first_loss=2.1, fingerprint="a")


@pytest.mark.parametrize(
    ("cell", "rank_0", "rank_1", "why"),
    [
        (ONE_ORDER, replace(GOOD, apart=1e-9), GOOD, "1.0e-09 from eager"),
        (OTHER_ORDER, replace(GOOD, missed=2e-5), GOOD, "of their way"),
        (OTHER_ORDER, replace(GOOD, missed=math.nan), GOOD, "of their way"),
        (OTHER_ORDER, replace(GOOD, loss=1.502), GOOD, "the loss is 0.13% off"),
        (COMPRESSED, replace(GOOD, missed=0.3), GOOD, "30.00% of their way"),
        (COMPRESSED, replace(GOOD, loss=1.52), GOOD, "the loss is 1.33% off"),
        (COMPRESSED, replace(GOOD, loss=math.nan), GOOD, "the loss is nan% off"),
        (COMPRESSED, GOOD, replace(GOOD, fingerprint="b"), "replicas differ"),
        (COMPRESSED, GOOD, Found(failed="RuntimeError: no"), "RuntimeError: no"),
    ],
)
def test_what_is_wrong_fails(cell: Cell, rank_0: Found, rank_1: Found, why: str):
    assert verdict(cell, [GOOD, GOOD]) == "passes"
    said = verdict(cell, [rank_0, rank_1])
    assert said.startswith("fails")
    assert why in said


def test_an_error_of_fxcomps_refuses_a_cell():
    assert verdict(COMPRESSED, [Found(refused="BadOption"), GOOD]) == "refused: BadOption"


def test_every_two_choices_meet():
    def met(cells: list[Cell]) -> set[tuple[object, ...]]:
        return {(k, row[k], j, row[j]) for row in map(astuple, cells) for k, j in itertools.combinations(range(5), 2)}

    assert met(pairs(2)) == met(product(2))


def test_the_page_has_the_records_of_cells_that_the_matrix_knows():
    records = kept(RECORDS)
    assert set(records) <= {cell for ranks in RANKS for cell in product(ranks)}
    page = PAGE.read_text()
    assert page[page.index(BEGIN) : page.index(END) + len(END)] == section(records)
