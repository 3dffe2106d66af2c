"""Add up and multiply in the order of the references: the upper half to the lower, until one is left."""

from __future__ import annotations

from fxcomp.compressors.triton.language import constexpr, jit, tl


@jit
def sum_of_columns(terms, ROWS: constexpr, WIDTH: constexpr):
    """Add up each row."""
    if WIDTH == 1:
        return tl.reshape(terms, [ROWS])
    else:  # noqa: RET505  Triton compiles one branch only
        low, high = tl.split(tl.permute(tl.reshape(terms, [ROWS, 2, WIDTH // 2]), (0, 2, 1)))
        return sum_of_columns(low + high, ROWS, WIDTH // 2)


@jit
def sum_of_rows(terms, HEIGHT: constexpr, WIDTH: constexpr):
    """Add up each column."""
    if HEIGHT == 1:
        return tl.reshape(terms, [WIDTH])
    else:  # noqa: RET505
        low, high = tl.split(tl.permute(tl.reshape(terms, [2, HEIGHT // 2, WIDTH]), (1, 2, 0)))
        return sum_of_rows(low + high, HEIGHT // 2, WIDTH)


@jit
def product_of_rows(factors, HEIGHT: constexpr, WIDTH: constexpr):
    """Multiply each column."""
    if HEIGHT == 1:
        return tl.reshape(factors, [WIDTH])
    else:  # noqa: RET505
        low, high = tl.split(tl.permute(tl.reshape(factors, [2, HEIGHT // 2, WIDTH]), (1, 2, 0)))
        return product_of_rows(low * high, HEIGHT // 2, WIDTH)


@jit
def sum_of(lanes, WIDTH: constexpr):
    """Add up a vector."""
    return tl.sum(sum_of_rows(tl.reshape(lanes, [WIDTH, 1]), WIDTH, 1), axis=0)
