"""Divided models on real ranks."""
