"""Moving bytes between ranks: one seam (`base.Transport`) and what stands behind it."""

from evenstep.transport.fall_through import fall_through

__all__ = ["fall_through"]
