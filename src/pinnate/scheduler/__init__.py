"""Continuous batching: who computes which tokens in the next step. Integers only; runs nothing itself."""
