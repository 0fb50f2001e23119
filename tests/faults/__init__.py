"""Tests that kill, freeze or mislead ranks."""
