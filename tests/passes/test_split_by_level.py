"""A hierarchical strategy crosses the slow link once a byte; a strategy that leaves ranks out is refused."""

import pytest
from before_after import before_after
from graphs import TWO, TWO_BY_TWO, one_bucket
from stages import bucketed

from fxcomp.errors import BadPlan
from fxcomp.passes.split_by_level import split_by_level

HIERARCHICAL = "reduce_scatter@intra > all_reduce@inter > all_gather@intra"


def test_a_hierarchical_bucket_is_scattered_reduced_and_gathered(golden):
    plan = one_bucket(HIERARCHICAL)
    text, _ = before_after(split_by_level, bucketed(plan, TWO_BY_TWO), plan, TWO_BY_TWO)
    golden("split_by_level/two_by_two.txt", text)


def test_a_flat_bucket_stays_as_it_is():
    plan = one_bucket("all_reduce@world")
    text, _ = before_after(split_by_level, bucketed(plan, TWO_BY_TWO), plan, TWO_BY_TWO)
    before, _, after = text.partition("\n\n-->\n\n")
    assert before == after


def test_one_level_alone_is_refused_where_it_leaves_ranks_out():
    plan = one_bucket("all_reduce@inter")
    with pytest.raises(BadPlan, match="reduces over inter alone, which joins 2 of 4 ranks") as error:
        split_by_level(bucketed(plan, TWO_BY_TWO), plan, TWO_BY_TWO)
    assert "Use @world" in str(error.value)
    split_by_level(bucketed(plan, TWO), plan, TWO)
