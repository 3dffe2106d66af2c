"""The search for guilty tensors, over losses that are made up: it names the planted ones, and nothing within noise."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Collection, Mapping

import pytest

from fxcomp.commands.bisect.search import Comparison, SearchFindings, differences, most_trainings, search
from fxcomp.errors import BadOption

NAMES = [f"layer.{k}.weight" for k in range(16)]


def planted(costs: Mapping[str, float], noise: float = 0.01, seed: int = 0) -> Callable[[Collection[str], int], float]:
    """Losses about 2, with what each compressed tensor costs; half of the noise is a seed's own, as of its batches."""

    def train(compressed: Collection[str], number: int) -> float:
        of_seed = random.Random(f"{seed} {number}").gauss(0, 5 * noise)
        of_run = random.Random(f"{seed} {number} {sorted(compressed)}").gauss(0, noise)
        return 2.0 + of_seed + (of_run if compressed else 0.0) + sum(costs.get(name, 0.0) for name in compressed)

    return train


def named(found: SearchFindings) -> set[tuple[str, ...]]:
    return set(found.guilty)


@pytest.mark.parametrize("guilty", [0, 7, 8, 15])
def test_one_guilty_tensor_is_named(guilty: int):
    found = search(NAMES, planted({NAMES[guilty]: 0.5}), 4)
    assert named(found) == {(NAMES[guilty],)}
    assert next(iter(found.guilty.values())).cost == pytest.approx(0.25, abs=0.03)
    assert found.rest is not None
    assert not found.rest.counts()
    assert found.trainings <= most_trainings(16, 4)[0] == 4 * (2 + 2 * 4 + 1)


@pytest.mark.parametrize("pair", [(1, 12), (4, 5), (0, 15)])
def test_two_guilty_tensors_are_named(pair: tuple[int, int]):
    found = search(NAMES, planted({NAMES[k]: 0.4 for k in pair}), 4)
    assert named(found) == {(NAMES[k],) for k in pair}
    assert found.trainings <= sum(most_trainings(16, 4))


def test_all_tensors_are_named_singly_where_each_is_guilty():
    found = search(NAMES, planted(dict.fromkeys(NAMES, 0.3)), 3)
    assert list(found.guilty) == [(name,) for name in NAMES]
    assert found.rest is None


def searches_that_name(diverging: float, searches: int = 400) -> int:
    """Count searches that name somebody where nobody is guilty, and trainings diverge by chance."""

    def train_of(seed: int) -> Callable[[Collection[str], int], float]:
        train = planted({}, seed=seed)

        def by_chance(compressed: Collection[str], number: int) -> float:
            draw = random.Random(f"{seed} {number} {sorted(compressed)} diverges").random()
            return math.nan if compressed and draw < diverging else train(compressed, number)

        return by_chance

    return sum(bool(search(NAMES, train_of(seed), 4).guilty) for seed in range(searches))


@pytest.mark.parametrize("diverging", [0.0, 0.02, 0.1])
def test_few_searches_name_somebody_where_nobody_is_guilty(diverging: float):
    """docs/by_hand.md says 3 of 100."""
    assert searches_that_name(diverging) <= 16


def test_few_searches_name_an_innocent_tensor_beside_a_guilty_one():
    searches = [search(NAMES, planted({NAMES[7]: 0.5}, seed=seed), 4) for seed in range(200)]
    assert sum({NAMES[7]} != {name for names in found.guilty for name in names} for found in searches) <= 6


def test_equal_losses_are_no_cost():
    found = search(NAMES, lambda _, seed: 2.0 + seed, 2)
    assert (found.guilty, found.rest) == ({}, None)
    assert (found.in_all.cost, found.in_all.noise) == (0.0, 1e-4)


def test_seeds_that_change_nothing_are_refused():
    with pytest.raises(BadOption, match=r"seeds change nothing in this job: without compression each of 4 ends with"):
        search(NAMES, lambda compressed, _: 2.0 + 0.001 * len(compressed), 4)


def test_a_cost_up_to_the_least_is_not_searched():
    train = planted({NAMES[5]: 0.001}, noise=1e-5)
    found = search(NAMES, train, 3, least=0.001)
    assert found.in_all.counts()
    assert (found.guilty, found.trainings) == ({}, 6)
    assert named(search(NAMES, train, 3)) == {(NAMES[5],)}


def test_where_everything_is_a_little_guilty_groups_are_named_and_no_single_tensor():
    found = search(NAMES, planted(dict.fromkeys(NAMES, 0.004), noise=0.02, seed=3), 5)
    assert found.in_all.counts()
    assert named(found)
    assert all(len(names) > 1 for names in found.guilty)


def test_tensors_that_are_guilty_only_together_are_named_together():
    def train(compressed: Collection[str], seed: int) -> float:
        return (2.0 + seed) * (1.25 if {NAMES[2], NAMES[13]} <= set(compressed) else 1.0)

    found = search(NAMES, train, 2)
    assert named(found) == {tuple(NAMES)}
    assert found.rest is None


def test_a_second_fault_that_the_first_one_hides_is_found():
    """One tensor breaks everything by itself; another one costs little, but more than noise."""
    found = search(NAMES, planted({NAMES[3]: 5.0, NAMES[9]: 0.2}), 4)
    assert named(found) == {(NAMES[3],), (NAMES[9],)}


def test_a_training_that_diverges_is_an_infinite_cost():
    def train(compressed: Collection[str], seed: int) -> float:
        return math.nan if NAMES[6] in compressed else 2.0 + 0.1 * seed

    found = search(NAMES, train, 3)
    assert named(found) == {(NAMES[6],)}
    (cost,) = found.guilty.values()
    assert (cost.cost, cost.diverging) == (math.inf, 3)


@pytest.mark.parametrize("seeds", [2, 4])
def test_one_seed_that_diverges_names_nobody(seeds: int):
    def train(compressed: Collection[str], seed: int) -> float:
        return math.nan if len(compressed) == len(NAMES) and seed == 1 else planted({})(compressed, seed)

    found = search(NAMES, train, seeds)
    assert (found.guilty, found.in_all.diverging) == ({}, 1)
    assert math.isfinite(found.in_all.cost)


def test_seeds_that_do_not_diverge_still_tell_a_cost():
    def train(compressed: Collection[str], seed: int) -> float:
        return math.inf if compressed and seed == 1 else planted({NAMES[9]: 0.5})(compressed, seed)

    found = search(NAMES, train, 5)
    assert named(found) == {(NAMES[9],)}
    assert next(iter(found.guilty.values())).cost == pytest.approx(0.25, abs=0.03)


def test_a_gain_is_no_guilt():
    assert search(NAMES, planted({NAMES[2]: -0.5}), 4).guilty == {}


def test_no_training_is_run_twice():
    seen: list[tuple[frozenset[str], int]] = []

    def train(compressed: Collection[str], seed: int) -> float:
        seen.append((frozenset(compressed), seed))
        return planted({NAMES[5]: 0.5})(compressed, seed)

    found = search(NAMES, train, 3)
    assert len(seen) == len(set(seen)) == found.trainings


def test_findings_go_from_ranks_to_the_parent():
    found = search(NAMES, planted({NAMES[5]: 0.5}), 3)
    assert pickle.loads(pickle.dumps(found)) == found


def test_noise_is_that_of_pairs_and_costs_are_shares():
    """A spread that both share is no noise of their difference, whatever the scale of a seed's loss."""
    found = Comparison.of(differences([1.0, 5.0, 9.0], [1.5, 7.5, 13.4]))
    assert found.counts()
    assert found.cost == pytest.approx(0.5, abs=0.01)
    assert not Comparison.of(differences([1.0, 5.0, 9.0], [1.5, 5.1, 9.0])).counts()
    assert Comparison.of(differences([-2.0, -2.0], [-1.0, -1.01])).cost == pytest.approx(0.5, abs=0.01)


def test_seeds_that_lie_close_together_by_chance_are_no_certainty():
    assert Comparison.of([0.01, 0.0101, 0.0102]).counts()
    assert not Comparison.of([0.01, 0.0101, 0.0102], usual=0.02).counts()
