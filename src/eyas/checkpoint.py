"""Reading and writing EAGLE-1/2 draft checkpoints in the published layout, strictly.

A checkpoint is a folder (or a hub repository) with ``config.json`` and the weights as ``*.safetensors`` or
``pytorch_model*.bin``, in one file or several. Its tensors decide what it is; where the configuration disagrees with them,
they win. Nothing is ever left at its random initialisation: a missing, surplus or misshapen tensor is named and refused.
Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.errors import EyasError, first_line
from eyas.files import existing_parent, user_path, write_error
from eyas.heads.eagle import EagleHead, HeadConfig

DERIVED = "rotary_emb.inv_freq"  # old checkpoints store this constant; it follows from the configuration
PUBLISHED_EPS = 1e-6  # what the published code assumes when config.json has no rms_norm_eps
PUBLISHED_THETA = 10000.0  # likewise for rope_theta


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft checkpoint as read: what it is, and its weights.

    Attributes:
        name: what the user called it.
        kind: ``"eagle"`` (EAGLE-1/2) or ``"eagle3"``, recognised from the tensors.
        raw: ``config.json`` as it stands.
        tensors: every tensor that belongs to the head, by its published name.
        embedding: the checkpoint's own token embedding [V, H], or None: the target's.
        token_map: target ids [draft vocabulary] int64 of a reduced draft vocabulary, or None.
    """

    name: str
    kind: str
    raw: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor | None = None
    token_map: Tensor | None = None

    @property
    def parameters(self) -> int:
        """How many numbers the head itself holds (embedding and map not counted)."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def hidden_size(self) -> int:
        """Width of the target's features that the head reads."""
        return self.tensors["fc.weight"].shape[0]


def read_checkpoint(source: str | os.PathLike[str]) -> DraftCheckpoint:
    """Read a draft checkpoint from a folder or a hub id.

    Raises:
        EyasError: it is missing, unreadable, corrupt, holds non-finite values, or is no EAGLE draft.
    """
    name = os.fspath(source)
    if not name:
        raise EyasError("the draft's name is empty; pass a folder or a hub id")
    folder = find_folder(name)
    raw = _read_config(folder, name)
    tensors = {key: value for key, value in _read_tensors(folder, name).items() if not key.endswith(DERIVED)}
    for key, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value.float()).all()):
            raise EyasError(f"draft {name}: tensor {key} holds NaN or infinite values; fetch or train it again")
    if "fc.weight" not in tensors or tensors["fc.weight"].ndim != 2:
        raise EyasError(f"draft {name}: no matrix fc.weight, so this is no EAGLE draft; pass one with --draft")
    kind = "eagle3" if any(key.startswith("midlayer.") for key in tensors) or _is_wide(tensors["fc.weight"]) else "eagle"
    embedding = tensors.pop("embed_tokens.weight", None)
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)  # the same map, as a mask
    if offsets is not None and (offsets.ndim != 1 or offsets.dtype not in (torch.int64, torch.int32)):
        raise EyasError(f"draft {name}: its token map (d2t) is no list of whole numbers; fetch or train it again")
    token_map = None if offsets is None else offsets.long() + torch.arange(len(offsets))
    return DraftCheckpoint(name, kind, raw, tensors, embedding, token_map)


def build_head(checkpoint: DraftCheckpoint) -> EagleHead:
    """The head with the checkpoint's weights, float32 or as stored.

    Raises:
        EyasError: an EAGLE-3 file, or a missing, surplus or misshapen tensor.
    """
    if checkpoint.kind != "eagle":
        raise EyasError(
            f"draft {checkpoint.name}: this is an EAGLE-3 head, which this version does not run; use an EAGLE-1/2 draft"
        )
    try:
        head = EagleHead(head_config(checkpoint))
    except EyasError:
        raise
    except Exception as error:  # whatever an impossible value of config.json makes the libraries raise
        raise EyasError(
            f"draft {checkpoint.name}: config.json describes no head ({type(error).__name__}: {first_line(error)}); mend it"
        ) from error
    expected, found = dict(head.state_dict()), checkpoint.tensors
    for problem, names in (("missing", expected.keys() - found.keys()), ("surplus", found.keys() - expected.keys())):
        if names:
            raise EyasError(f"draft {checkpoint.name}: {problem} tensor {', '.join(sorted(names))}; not an EAGLE-1/2 layout")
    for key, tensor in expected.items():
        if tensor.shape != found[key].shape:
            raise EyasError(
                f"draft {checkpoint.name}: tensor {key} is {list(found[key].shape)} where config.json "
                f"implies {list(tensor.shape)}"
            )
        if found[key].dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            raise EyasError(
                f"draft {checkpoint.name}: tensor {key} is {found[key].dtype}; quantised drafts are not supported, "
                "fetch a plain one"
            )
    head.load_state_dict(found)
    return head.eval().requires_grad_(False)


def check_fit(checkpoint: DraftCheckpoint, hidden_size: int, vocab_size: int, target: str) -> None:
    """Compare the checkpoint with a target's sizes before anything runs.

    Raises:
        EyasError: hidden size, vocabulary, embedding or token map do not fit the target.
    """
    name = checkpoint.name
    if checkpoint.hidden_size != hidden_size:
        raise EyasError(
            f"draft {name} was made for a target of hidden size {checkpoint.hidden_size}, but {target} has {hidden_size}; "
            "pass the draft that belongs to this target"
        )
    drafted = checkpoint.raw.get("vocab_size", vocab_size)
    if drafted != vocab_size:
        raise EyasError(
            f"draft {name} was made for a vocabulary of {drafted} tokens, but {target} has {vocab_size}; "
            "pass the draft that belongs to this target"
        )
    if checkpoint.embedding is not None and tuple(checkpoint.embedding.shape) != (vocab_size, hidden_size):
        raise EyasError(
            f"draft {name}: embed_tokens.weight is {list(checkpoint.embedding.shape)}, but {target} "
            f"needs {[vocab_size, hidden_size]}"
        )
    ids = checkpoint.token_map
    if ids is not None and (
        not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids)
    ):
        raise EyasError(f"draft {name}: its token map (d2t) does not name distinct tokens of {target}'s vocabulary")


def head_config(checkpoint: DraftCheckpoint) -> HeadConfig:
    """The head's sizes: from the tensors where they tell, from ``config.json`` where only it does.

    Raises:
        EyasError: ``config.json`` lacks ``num_attention_heads``, or the sizes contradict each other.
    """
    raw, tensors, name = checkpoint.raw, checkpoint.tensors, checkpoint.name
    prefix = "layers.0."
    needed = [prefix + part for part in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.gate_proj.weight")]
    missing = [key for key in needed if key not in tensors]
    if missing:
        raise EyasError(f"draft {name}: missing tensor {', '.join(missing)}; not an EAGLE-1/2 layout")
    heads = raw.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise EyasError(f"draft {name}: config.json does not say num_attention_heads; complete it")
    query, key, gate = (tensors[key] for key in needed)
    head_dim = raw.get("head_dim") or query.shape[0] // heads
    kv_heads = key.shape[0] // head_dim
    if heads * head_dim != query.shape[0] or kv_heads * head_dim != key.shape[0] or not kv_heads or heads % kv_heads:
        raise EyasError(
            f"draft {name}: {heads} heads of size {head_dim} (config.json) do not fit q_proj {list(query.shape)} "
            f"and k_proj {list(key.shape)}"
        )
    return HeadConfig(
        hidden_size=checkpoint.hidden_size,
        intermediate_size=gate.shape[0],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=raw.get("vocab_size", 0),
        rms_norm_eps=float(raw.get("rms_norm_eps", PUBLISHED_EPS)),
        hidden_act=raw.get("hidden_act", "silu"),
        rope=rope_parameters(raw),
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        fc_bias="fc.bias" in tensors,
        qkv_bias=prefix + "self_attn.q_proj.bias" in tensors,
        draft_vocab_size=None if checkpoint.token_map is None else len(checkpoint.token_map),
    )


def rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """transformers 5's ``rope_parameters`` from a configuration of either generation."""
    found = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    found.setdefault("rope_type", found.pop("type", "default"))
    found.setdefault("rope_theta", raw.get("rope_theta") or PUBLISHED_THETA)
    return found


def save_head(head: EagleHead, folder: Path, token_map: Tensor | None = None, extra: dict[str, Any] | None = None) -> None:
    """Write a head as a bfloat16 checkpoint in the published layout, each file complete or absent.

    Args:
        head: the head to store.
        folder: created if need be; only ``config.json`` and ``model.safetensors`` in it are replaced, once complete.
        token_map: target ids [draft vocabulary] int64, stored as EAGLE-3's ``d2t`` = target id − draft id.
        extra: further keys for ``config.json``.

    Raises:
        EyasError: it cannot be written, for example because the disk is full; what was there before stays.
    """
    config = head.config
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.get("rope_theta", PUBLISHED_THETA),
        "rope_parameters": dict(config.rope),
        "bias": config.fc_bias,
        "qkv_bias": config.qkv_bias,
        "torch_dtype": "bfloat16",
        **({} if token_map is None else {"draft_vocab_size": len(token_map)}),
        **(extra or {}),
    }
    tensors = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in head.state_dict().items()}
    if token_map is not None:
        tensors["d2t"] = token_map.cpu().long() - torch.arange(len(token_map))
    check_writable(folder)
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("model.safetensors", "config.json")]
    temporary = [file.with_name(f".{file.name}-{os.getpid()}") for file in files]
    try:
        save_file(tensors, temporary[0], metadata={"format": "pt"})
        temporary[0].chmod(0o644)  # made for its owner alone
        temporary[1].write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        for new, file in zip(temporary, files, strict=True):
            new.replace(file)
    except (OSError, SafetensorError) as error:
        raise write_error(f"draft {folder}", error) from error
    finally:
        for new in temporary:
            new.unlink(missing_ok=True)
        if fresh and not any(folder.iterdir()):
            folder.rmdir()


def check_writable(folder: Path) -> None:
    """Refuse an output folder that cannot hold a draft, before any work is done for it.

    Raises:
        EyasError: it is a file, cannot be written, or holds weights of something else than one draft file.
    """
    if folder.exists() and not folder.is_dir():
        raise EyasError(f"output {folder}: this is a file; pass a folder")
    try:
        with tempfile.TemporaryFile(dir=existing_parent(folder)):
            pass
    except OSError as error:
        raise EyasError(f"output {folder}: cannot be written ({error.strerror}); pass another folder") from error
    others = {file.name for pattern in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern)}
    if others - {"model.safetensors"}:
        raise EyasError(f"output {folder}: it holds other weights ({', '.join(sorted(others))}); pass another folder")
    if others and "fc.weight" not in _names(folder / "model.safetensors"):
        raise EyasError(f"output {folder}: its model.safetensors is no draft; pass another folder")


def _names(file: Path) -> set[str]:
    """Names of a safetensors file's tensors; none where it is damaged."""
    try:
        with safe_open(file, "pt") as opened:
            return set(opened.keys())
    except (OSError, SafetensorError):
        return set()


def find_folder(name: str) -> Path:
    """The folder of a local path or, fetched through huggingface_hub, of a hub id."""
    folder = user_path(name)
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise EyasError(f"draft {name}: no such folder; pass a folder with config.json and weights, or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except (OSError, ValueError, RuntimeError) as error:
        raise EyasError(f"draft {name}: no such folder, and the hub did not give it ({first_line(error)})") from error


def _is_wide(fc: Tensor) -> bool:
    """Whether ``fc`` joins three feature streams (EAGLE-3) instead of one feature and an embedding."""
    return fc.ndim == 2 and fc.shape[1] == 3 * fc.shape[0]


def _read_config(folder: Path, name: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EyasError(f"draft {name}: no config.json in it; pass a folder with config.json and weights") from None
    except (OSError, ValueError) as error:
        raise EyasError(f"draft {name}: config.json is unreadable ({first_line(error)}); fetch it again") from error
    if not isinstance(raw, dict):
        raise EyasError(f"draft {name}: config.json is not a JSON object; fetch it again")
    return raw


def _read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of the folder's weight files, safetensors preferred; several shards need no index file."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise EyasError(f"draft {name}: no *.safetensors or pytorch_model*.bin weights in it")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            part = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        except Exception as error:  # a damaged file makes the readers raise all sorts
            reason = first_line(error) if file.suffix == ".safetensors" else "not a plain pickle of tensors"
            raise EyasError(f"draft {name}: {file.name} is corrupt or unsafe ({reason}); fetch it again") from error
        if not isinstance(part, dict) or not all(isinstance(value, Tensor) for value in part.values()):
            raise EyasError(f"draft {name}: {file.name} is not a plain dictionary of tensors")
        tensors.update(part)
    return tensors
