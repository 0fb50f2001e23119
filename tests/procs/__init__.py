"""Tests that start ranks."""
