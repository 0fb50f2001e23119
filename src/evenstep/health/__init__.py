"""What a rank says of its own end, readable by the others and by the launcher."""
