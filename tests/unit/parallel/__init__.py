"""Divided models."""
