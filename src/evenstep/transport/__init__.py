"""Moving bytes between ranks: one seam (`base.Transport`) and what stands behind it."""
