"""What a draft checkpoint is, told from its files; with a target, whether it fits. Reads no target weights."""

from __future__ import annotations

from transformers import AutoConfig

from eyas.checkpoint import DraftCheckpoint, build_head, check_fit, head_config
from eyas.errors import EyasError, first_line
from eyas.loading import find_target, quiet_libraries, read_draft
from eyas.target import check_configuration

Lines = list[tuple[str, str]]


def inspect_draft(draft: str | None, target: str | None, trust_remote_code: bool = False) -> tuple[Lines, EyasError | None]:
    """Describe a draft, and compare it with a target if one is named.

    Args:
        draft: hub id or folder; None: the shipped one.
        target: hub id, folder or .gguf file, or None.
        trust_remote_code: run code that comes with the target's configuration.

    Returns:
        Lines of (name, value), and what stands in the way of using it, if anything.

    Raises:
        EyasError: the draft cannot be read at all, or the target's configuration cannot.
    """
    checkpoint = read_draft(draft)
    lines, problem = describe(checkpoint)
    if target is None:
        return lines, problem
    with quiet_libraries():
        name, place, options = find_target(target)
        try:
            config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
        except Exception as error:
            raise EyasError(f"target {name}: its configuration cannot be read ({first_line(error)}); check the name") from error
    check_configuration(config, name)
    text = config.get_text_config()
    try:
        check_fit(checkpoint, text.hidden_size, text.vocab_size, name)
    except EyasError as error:
        return [*lines, ("fits", f"not {name}")], problem or error
    return [*lines, ("fits", f"{name} (hidden size {text.hidden_size}, {text.vocab_size} tokens)")], problem


def describe(checkpoint: DraftCheckpoint) -> tuple[Lines, EyasError | None]:
    """A checkpoint's properties, and why it cannot be used, if so."""
    raw, recorded = checkpoint.raw, checkpoint.raw.get("eyas")
    kind = {"eagle": "EAGLE-1/2 head", "eagle3": "EAGLE-3 head"}[checkpoint.kind]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in checkpoint.tensors.values()})
    lines = [
        ("draft", checkpoint.name),
        (
            "kind",
            f"{kind}, {len(checkpoint.tensors)} tensors, {checkpoint.parameters:,} parameters, {', '.join(dtypes)}",
        ),
        (
            "for a target",
            f"of hidden size {checkpoint.hidden_size}, {raw.get('vocab_size', 'unknown number of')} tokens",
        ),
        ("trained for", str(recorded["target"]) if isinstance(recorded, dict) and "target" in recorded else "not recorded"),
        ("embedding", "its own" if checkpoint.embedding is not None else "the target's"),
        ("LM head", "the target's" if checkpoint.kind == "eagle" else "its own"),
        (
            "proposes",
            "any token" if checkpoint.token_map is None else f"{len(checkpoint.token_map)} frequent tokens (d2t)",
        ),
    ]
    try:
        build_head(checkpoint)
        config = head_config(checkpoint)
    except EyasError as error:
        return lines, error
    said = raw.get("rope_theta") or raw.get("rope_parameters")
    rope = ", ".join(f"{key} {value}" for key, value in config.rope.items())
    lines += [
        ("heads", f"{config.num_attention_heads}, {config.num_key_value_heads} key/value, of {config.head_dim}"),
        ("MLP", f"{config.intermediate_size}, {config.hidden_act}"),
        ("biases", f"fc {'yes' if config.fc_bias else 'no'}, q/k/v {'yes' if config.qkv_bias else 'no'}"),
        ("rotary", rope if said else f"{rope} (config.json says nothing: the published default)"),
        ("missing", "nothing"),
    ]
    return lines, None
