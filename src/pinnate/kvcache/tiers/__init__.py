"""Tiers below the KV pool: where cached pages go that the pool has no room for, and come back from."""
