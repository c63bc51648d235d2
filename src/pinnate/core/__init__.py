"""Pinnate."""
