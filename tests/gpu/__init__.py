"""Tests that need a GPU, and skip without one."""
