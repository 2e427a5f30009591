"""Shared fixtures. Tests run real processes (see harness.py)."""
