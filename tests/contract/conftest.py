"""The server of the end-to-end tests."""

from tests.e2e.conftest import server

__all__ = ["server"]
