"""What survives a run: checkpoints that exist whole or not at all, and the exact way back into them."""
