"""Sum the errors of strategies over a workload's gradients, by an error table.

    error of a plan = sum of weight · error over all gradients
    weight          = sum of the gradient's squares · elements of all gradients / sum of all squares

Weights add up to the number of elements, so limits and errors of plans are in elements. Without a table all elements
have equal weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fxcomp.cluster.cluster import Cluster
from fxcomp.compressors import Compressor
from fxcomp.error_tables import ASSUMED, ErrorTable
from fxcomp.plan.budget import strategy_errors
from fxcomp.plan.strategy import Strategy
from fxcomp.search.atoms import Atom
from fxcomp.search.workload import Gradient

Numbers = Any


class Losses:
    """Errors of strategies on gradients, cached by strategy."""

    def __init__(self, gradients: Sequence[Gradient], cluster: Cluster, table: ErrorTable = ASSUMED) -> None:
        self._names = [gradient.name for gradient in gradients]
        self._cluster, self._table = cluster, table
        elements = [gradient.elements for gradient in gradients]
        squares = [table.squares_of(gradient.name, gradient.elements) for gradient in gradients]
        self.elements = sum(elements)
        total = sum(squares)
        self.weights: Numbers = np.array(elements, dtype=float)
        if table.rows and total > 0:
            self.weights = np.array(squares) * (self.elements / total)
        self._columns: dict[tuple[Compressor, int], Numbers] = {}
        self._errors: dict[Strategy, Numbers] = {}

    def errors(self, strategy: Strategy) -> Numbers:
        found = self._errors.get(strategy)
        if found is None:
            errors = strategy_errors(strategy, self._cluster, self._column)  # a single number for a dense strategy
            found = self._errors[strategy] = np.broadcast_to(errors, self.weights.shape)
        return found

    def of(self, strategy: Strategy, numbers: Sequence[int] | None = None) -> float:
        """Return the error of gradients (default: all), in elements."""
        lost = self.weights * self.errors(strategy)
        return float(lost.sum() if numbers is None else lost[list(numbers)].sum())

    def sums(self, atoms: Sequence[Atom], borders: Sequence[int], strategies: Sequence[Strategy]) -> Numbers:
        """Return each strategy's error on the atoms before each border, shape [borders, strategies]."""
        numbers = [atom.number for atom in atoms]
        shares = np.array([atom.elements / max(1, atom.gradient.elements) for atom in atoms])
        weights = self.weights[numbers] * shares if atoms else np.zeros(0)
        errors = np.stack([self.errors(strategy)[numbers] for strategy in strategies])
        before = np.zeros((len(strategies), len(atoms) + 1))
        np.cumsum(weights * errors, axis=1, out=before[:, 1:])
        return before[:, list(borders)].T

    def _column(self, compressor: Compressor, ranks: int) -> Numbers:
        found = self._columns.get((compressor, ranks))
        if found is None:
            found = np.array(self._table.errors_of(self._names, compressor, ranks))
            self._columns[compressor, ranks] = found
        return found
