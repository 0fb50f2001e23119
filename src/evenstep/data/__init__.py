"""Who sees which sample when: order, sampler, loader."""
