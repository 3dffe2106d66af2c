"""Price what moves memory and computes next to nothing, by the bandwidths of a cost table."""

from __future__ import annotations


class MemoryPrices:
    """Prices in us, of sizes in bytes; a cost table has the bandwidths."""

    __slots__ = ()

    pack_gb_per_s: float
    copy_gb_per_s: float | None

    def pack_us(self, size: float) -> float:
        """Time gathering gradients of `size` bytes into a bucket, scaled."""
        return size / (self.pack_gb_per_s * 1e3)

    def copy_us(self, size: float) -> float:
        """Time moving `size` bytes between host and device; nothing if they are the same."""
        return 0.0 if self.copy_gb_per_s is None else size / (self.copy_gb_per_s * 1e3)

    def keep_us(self, size: float) -> float:
        """Time making a summed payload of `size` bytes a compressor's next state."""
        return self.pack_us(size)

    def accumulate_us(self, size: float) -> float:
        """Time accumulating a bucket of `size` bytes into its velocity: it moves twice what a copy does."""
        return 2 * self.pack_us(size)

    def mask_us(self, size: float) -> float:
        """Time clearing the velocity where a value was sent: it reads the residual, and writes little."""
        return self.pack_us(size)
