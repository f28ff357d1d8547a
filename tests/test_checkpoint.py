"""Draft checkpoints: every published layout is read, everything else refused in one line, and writing is all or nothing."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas import EyasError, checkpoint
from eyas.checkpoint import build_head, check_fit, read_checkpoint, rope_parameters, save_head
from eyas.drafters.eagle import EagleDraft
from eyas.engine import Engine
from eyas.heads.eagle import EagleHead, HeadConfig
from eyas.loading import EMBEDDED_DRAFT, load_draft
from tests import families
from tests.drafts import METHODS, engine, random_head

HIDDEN, VOCABULARY = 32, families.VOCABULARY
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "rope_theta": 500.0,
}  # fmt: skip
Tensors = dict[str, Tensor]


def head_of(**changes: Any) -> EagleHead:
    sizes = {
        "hidden_size": HIDDEN, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope": {"rope_type": "default", "rope_theta": 500.0},
    }  # fmt: skip
    return random_head(HeadConfig(**{**sizes, **changes}))


def tensors_of(head: EagleHead) -> Tensors:
    return {key: value.clone() for key, value in head.state_dict().items()}


def write(folder: Path, tensors: Tensors, config: Any = CONFIG, files: str = "model.safetensors", shards: int = 1) -> Path:
    """A checkpoint folder. ``files`` names the weights; several shards get an index file if it says so."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    base, indexed = files.removesuffix("+index"), files.endswith("+index")
    names = [base] if shards == 1 else [base.replace(".", f"-{part + 1:05}-of-{shards:05}.") for part in range(shards)]
    for part, name in enumerate(names):
        chunk = {key: tensors[key] for key in sorted(tensors)[part::shards]}
        if name.endswith(".safetensors"):
            save_file(chunk, folder / name)
        else:
            torch.save(chunk, folder / name)
    if indexed:
        places = {key: names[place % shards] for place, key in enumerate(sorted(tensors))}
        (folder / f"{base}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def assert_same_head(found: EagleHead, expected: EagleHead) -> None:
    """The same parameters and, which also tells the rotary base and the norm's epsilon, the same output."""
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(value, expected.state_dict()[key]) for key, value in found.state_dict().items())
    x, positions = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(0)), torch.arange(5)[None]
    torch.testing.assert_close(found(x, x, positions), expected(x, x, positions))


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("index", ["", "+index"])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_every_file_layout_is_read(file: str, index: str, shards: int, tmp_path: Path) -> None:
    """A shard that is skipped leaves its tensors random or missing."""
    head = head_of()
    read = read_checkpoint(write(tmp_path / "draft", tensors_of(head), files=file + index, shards=shards))
    assert (read.kind, read.hidden_size, read.embedding, read.token_map) == ("eagle", HIDDEN, None, None)
    assert read.parameters == sum(parameter.numel() for parameter in head.parameters())
    assert_same_head(build_head(read), head)


@pytest.mark.parametrize("says", [True, False, None])
@pytest.mark.parametrize("has", [True, False])
def test_the_tensors_decide_about_biases(has: bool, says: bool | None, tmp_path: Path) -> None:
    """Published configurations are silent or wrong about fc.bias: believing them drops a tensor or leaves one random."""
    head = head_of(fc_bias=has, qkv_bias=has)
    config = {**CONFIG, **({} if says is None else {"bias": says, "qkv_bias": says})}
    found = build_head(read_checkpoint(write(tmp_path / "draft", tensors_of(head), config)))
    assert ("fc.bias" in found.state_dict()) == ("layers.0.self_attn.q_proj.bias" in found.state_dict()) == has
    assert_same_head(found, head)


def test_tensors_win_over_sizes_in_the_configuration(tmp_path: Path) -> None:
    """A configuration copied from another target (full key heads, another width) must not decide shapes."""
    config = {**CONFIG, "num_key_value_heads": 4, "intermediate_size": 11008, "hidden_size": 4096}
    assert_same_head(build_head(read_checkpoint(write(tmp_path / "draft", tensors_of(head_of()), config))), head_of())


def test_published_defaults_where_the_configuration_is_silent(tmp_path: Path) -> None:
    """Without rope_theta and rms_norm_eps the published code takes 10000 and 1e-6."""
    config = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "rms_norm_eps")}
    expected = head_of(rms_norm_eps=1e-6, rope={"rope_type": "default", "rope_theta": 10000.0})
    assert_same_head(build_head(read_checkpoint(write(tmp_path / "draft", tensors_of(expected), config))), expected)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
        ({"rope_theta": 500.0, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 500.0}),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}, LINEAR),
        ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, LINEAR),
        ({"rope_parameters": LINEAR}, LINEAR),
        ({"rope_parameters": LINEAR, "rope_theta": 7.0}, LINEAR),
    ],
)
def test_rope_of_both_transformers_generations(raw: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    """A rotary base read from the wrong key turns every draft position by the wrong angle."""
    assert rope_parameters(raw) == expected
    config = {**{key: value for key, value in CONFIG.items() if key != "rope_theta"}, **raw}
    head = head_of(rope=expected)
    assert_same_head(build_head(read_checkpoint(write(tmp_path / "draft", tensors_of(head), config))), head)


@pytest.mark.skipif(not EMBEDDED_DRAFT.is_dir(), reason="no draft is shipped in this tree")
def test_the_shipped_draft_turns_positions_as_its_target_does() -> None:
    """SmolLM2's rotary base is 100000: with the published default of 10000 the draft would guess from wrong angles."""
    head = build_head(read_checkpoint(EMBEDDED_DRAFT)).to(torch.bfloat16)
    assert head.config.rope == {"rope_type": "default", "rope_theta": 100000.0} and head.config.head_dim == 64
    torch.testing.assert_close(head.rotary.inv_freq, 100000.0 ** (-torch.arange(0, 64, 2) / 64))


def test_own_embedding_is_kept_and_derived_constants_are_not(tmp_path: Path) -> None:
    """embed_tokens may be the checkpoint's own; a stored inv_freq is no parameter and no reason to refuse."""
    embedding = torch.randn(VOCABULARY, HIDDEN)
    extra = {"embed_tokens.weight": embedding, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder = write(tmp_path / "draft", {**tensors_of(head_of()), **extra})
    read = read_checkpoint(folder)
    assert read.embedding is not None and torch.equal(read.embedding, embedding)
    assert_same_head(build_head(read), head_of())
    draft = load_draft(folder, engine("llama").target)
    assert torch.equal(draft.embed(torch.tensor([5])), embedding[[5]])


def test_a_token_map_is_read_as_offsets(tmp_path: Path) -> None:
    """d2t holds target id − draft id; read as target ids it names other tokens."""
    ids = torch.tensor([2, 3, 11, 40])
    folder = write(tmp_path / "draft", {**tensors_of(head_of()), "d2t": ids - torch.arange(4), "t2d": torch.zeros(VOCABULARY)})
    read = read_checkpoint(folder)
    assert read.token_map is not None and read.token_map.tolist() == ids.tolist()
    head = build_head(read)
    assert head.config.draft_vocab_size == 4
    draft = load_draft(folder, engine("llama").target)
    tokens, _ = draft.candidates(torch.randn(1, 1, HIDDEN), 3)
    assert set(tokens.flatten().tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("mapped", [False, True])
def test_a_saved_head_comes_back(mapped: bool, tmp_path: Path) -> None:
    """What training writes, decoding must read: parameters in bfloat16, sizes, rotary base, map."""
    head = head_of(fc_bias=True, qkv_bias=True, rope=LINEAR).to(torch.bfloat16).float()
    ids = torch.tensor([1, 5, 30]) if mapped else None
    save_head(head, tmp_path / "deep" / "draft", ids, {"trained_on": "nothing"})
    read = read_checkpoint(tmp_path / "deep" / "draft")
    found = build_head(read).float()
    assert_same_head(found, head)
    assert (None if read.token_map is None else read.token_map.tolist()) == (None if ids is None else ids.tolist())
    assert found.config == HeadConfig(**{**vars(head.config), "draft_vocab_size": 3 if mapped else None})
    assert read.raw["trained_on"] == "nothing" and read.raw["architectures"] == ["LlamaForCausalLM"]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["draft"]  # no temporary beside it
    chosen = Engine(engine("llama").target, load_draft(tmp_path / "deep" / "draft", engine("llama").target))
    said = families.greedy(families.model("llama"), [1, 2, 3], 20)
    assert chosen.generate([1, 2, 3], max_new_tokens=20, method="eagle2", **METHODS["eagle2"]).token_ids == said


def test_saving_over_a_checkpoint_replaces_it_and_nothing_else(tmp_path: Path) -> None:
    """The user's other files in the folder, such as a model card, are theirs."""
    folder = write(tmp_path / "draft", tensors_of(head_of()))
    (folder / "README.md").write_text("my notes")
    head = head_of(fc_bias=True).to(torch.bfloat16).float()
    save_head(head, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert_same_head(build_head(read_checkpoint(folder)).float(), head)


def test_an_output_that_cannot_hold_a_draft_is_refused_first(tmp_path: Path) -> None:
    """Other weights would be read along with the new ones; a file is no folder."""
    shards = write(tmp_path / "shards", tensors_of(head_of()), shards=2)
    (tmp_path / "file").write_text("")
    for folder, reason in ((shards, "other weights"), (tmp_path / "file", "a file"), (tmp_path / "file" / "in", "cannot")):
        with pytest.raises(EyasError, match=reason):
            save_head(head_of(), folder)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("fails", ["save_file", "write_text", "replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_save_changes_nothing(
    fails: str, exists: bool, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or Ctrl-C in the middle must not cost the draft that was there, nor leave half a one."""
    folder = tmp_path / "draft"
    if exists:
        write(folder, tensors_of(head_of()))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("no space left")

    if fails == "save_file":
        monkeypatch.setattr(checkpoint, "save_file", fail)
    else:
        monkeypatch.setattr(Path, fails, fail)
    with pytest.raises(EyasError if error is OSError else error):
        save_head(head_of(fc_bias=True), folder)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == (["draft"] if exists else [])
    if exists:
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert_same_head(build_head(read_checkpoint(folder)), head_of())


# --- refusals -----------------------------------------------------------------------------------------------------------------


def load(folder: Path) -> EagleDraft:
    return load_draft(folder, engine("llama").target)


def refusal(folder: Path) -> str:
    """The one line in which a checkpoint is refused, naming it."""
    with pytest.raises(EyasError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


def changed(changes: dict[str, Any]) -> Tensors:
    """A good head's tensors with some replaced, or taken out where None."""
    return {key: value for key, value in {**tensors_of(head_of()), **changes}.items() if value is not None}


LAYER = "layers.0."
Q, NORM = f"{LAYER}self_attn.q_proj.weight", f"{LAYER}post_attention_layernorm.weight"
NAN = torch.full((HIDDEN,), float("nan"))
WRONG_TENSORS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no fc": ({"fc.weight": None}, ["no matrix fc.weight", "no EAGLE draft"]),
    "flat fc": ({"fc.weight": torch.ones(HIDDEN)}, ["no matrix fc.weight"]),
    "no q_proj": ({Q: None}, ["missing tensor layers.0.self_attn.q_proj.weight"]),
    "no o_proj": ({f"{LAYER}self_attn.o_proj.weight": None}, ["missing tensor layers.0.self_attn.o_proj.weight"]),
    "no norm": ({NORM: None}, [f"missing tensor {NORM}"]),
    "half of the biases": ({f"{LAYER}self_attn.q_proj.bias": torch.ones(HIDDEN)}, ["missing", "k_proj.bias", "v_proj.bias"]),
    "input norm": ({f"{LAYER}input_layernorm.weight": torch.ones(HIDDEN)}, ["surplus tensor layers.0.input_layernorm.weight"]),
    "second layer": ({"layers.1.mlp.up_proj.weight": torch.ones(40, HIDDEN)}, ["surplus tensor layers.1.mlp.up_proj.weight"]),
    "short norm": ({NORM: torch.ones(31)}, [NORM, "[31]", "[32]"]),
    "narrow mlp": ({f"{LAYER}mlp.up_proj.weight": torch.ones(39, HIDDEN)}, ["mlp.up_proj.weight", "[39, 32]", "[40, 32]"]),
    "odd heads": ({Q: torch.ones(30, HIDDEN)}, ["do not fit q_proj [30, 32]"]),
    "odd key heads": ({f"{LAYER}self_attn.k_proj.weight": torch.ones(24, HIDDEN)}, ["do not fit", "k_proj [24, 32]"]),
    "no key heads": ({f"{LAYER}self_attn.k_proj.weight": torch.ones(0, HIDDEN)}, ["k_proj [0, 32]"]),
    "nan": ({NORM: NAN}, [f"tensor {NORM} holds NaN"]),
    "infinite": ({NORM: torch.full((HIDDEN,), torch.inf)}, [f"tensor {NORM} holds NaN or infinite"]),
    "nan embedding": ({"embed_tokens.weight": NAN.expand(VOCABULARY, -1).clone()}, ["embed_tokens.weight holds NaN"]),
    "quantised": ({NORM: torch.ones(HIDDEN, dtype=torch.int8)}, [NORM, "torch.int8", "quantised"]),
    "wide fc": ({"fc.weight": torch.ones(HIDDEN, 3 * HIDDEN)}, ["EAGLE-3"]),
    "eagle 3": ({"midlayer.hidden_norm.weight": torch.ones(HIDDEN)}, ["this is an EAGLE-3 head"]),
    "other hidden size": ({"fc.weight": torch.ones(64, 128)}, ["target of hidden size 64, but llama has 32"]),
    "other embedding": ({"embed_tokens.weight": torch.ones(50, HIDDEN)}, ["embed_tokens.weight is [50, 32]", "[48, 32]"]),
    "map past the end": ({"d2t": torch.tensor([0, 47])}, ["token map (d2t)", "llama's vocabulary"]),
    "map below zero": ({"d2t": torch.tensor([-1, 5])}, ["token map (d2t)"]),
    "map with twins": ({"d2t": torch.tensor([3, 2])}, ["distinct tokens"]),
    "empty map": ({"d2t": torch.zeros(0, dtype=torch.int64)}, ["token map (d2t)"]),
    "map of numbers": ({"d2t": torch.zeros(4)}, ["token map (d2t) is no list of whole numbers"]),
    "square map": ({"d2t": torch.zeros(2, 3, dtype=torch.int64)}, ["token map (d2t) is no list of whole numbers"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors_are_named(case: str, tmp_path: Path) -> None:
    """Read leniently, a wrong tensor leaves part of the head random: acceptance collapses and nobody is told."""
    changes, parts = WRONG_TENSORS[case]
    message = refusal(write(tmp_path / "draft", changed(changes)))
    assert all(part in message for part in parts), message


WRONG_CONFIGS: dict[str, tuple[Any, str]] = {
    "not json": ("{", "config.json is unreadable"),
    "not an object": ("[1]", "config.json is not a JSON object"),
    "not text": ("\udcff", "config.json"),
    "no heads": ({**CONFIG, "num_attention_heads": None}, "does not say num_attention_heads"),
    "too many heads": ({**CONFIG, "num_attention_heads": 5}, "5 heads of size 6"),
    "wrong head size": ({**CONFIG, "head_dim": 16}, "4 heads of size 16 (config.json) do not fit"),
    "head size in words": ({**CONFIG, "head_dim": "eight"}, "config.json describes no head"),
    "unknown activation": ({**CONFIG, "hidden_act": "wishful"}, "config.json describes no head (KeyError"),
    "unknown rope": ({**CONFIG, "rope_scaling": {"type": "spiral", "factor": 2.0}}, "config.json describes no head"),
    "rope in words": ({**CONFIG, "rope_scaling": "linear"}, "config.json describes no head"),
    "epsilon in words": ({**CONFIG, "rms_norm_eps": "tiny"}, "config.json describes no head"),
    "other vocabulary": ({**CONFIG, "vocab_size": 50}, "made for a vocabulary of 50 tokens, but llama has 48"),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_wrong_configurations_are_told(case: str, tmp_path: Path) -> None:
    """A broken or foreign config.json must end in one line, not in a traceback or a head of other shape."""
    config, part = WRONG_CONFIGS[case]
    folder = write(tmp_path / "draft", tensors_of(head_of()))
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    message = refusal(folder)
    assert part in message, message


def test_missing_things_are_told(tmp_path: Path) -> None:
    """No folder, no configuration, no weights: each says what was looked for."""
    assert "no such folder" in refusal(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.touch()
    assert "no such folder" in refusal(file)
    folder = tmp_path / "draft"
    folder.mkdir()
    assert "no config.json" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert "no *.safetensors or pytorch_model*.bin" in refusal(folder)
    for name in ("nowhere", "a/b/c", "./nowhere", "~/nowhere-at-all"):
        with pytest.raises(EyasError, match="no such folder"):
            read_checkpoint(name)


def test_a_hub_id_that_cannot_be_fetched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, a mistyped id must not end in the hub library's traceback."""
    import huggingface_hub

    def fail(*args: Any, **kwargs: Any) -> str:
        raise OSError("we are offline\nsorry")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(EyasError, match=r"draft some/draft: .*the hub did not give it \(we are offline\)") as caught:
        read_checkpoint("some/draft")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("damage", ["empty", "cut", "rubbish", "other zip"])
def test_damaged_files_are_told(damage: str, file: str, tmp_path: Path) -> None:
    """An interrupted download is the user's to mend: one line that names the file."""
    folder = write(tmp_path / "draft", tensors_of(head_of()), files=file)
    path = folder / file
    content = path.read_bytes()
    damaged = {"empty": b"", "cut": content[: len(content) // 2], "rubbish": b"\x93rubbish" * 99, "other zip": b"PK\x03\x04"}
    path.write_bytes(damaged[damage])
    assert f"{file} is corrupt or unsafe" in refusal(folder)


class Payload:
    """Unpickled, it would make a folder."""

    def __init__(self, goal: Path) -> None:
        self.goal = goal

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.goal),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("plain", [True, False], ids=["plain pickle", "torch file"])
def test_code_in_a_pickle_never_runs(plain: bool, tmp_path: Path) -> None:
    """A .bin is a program: loaded as such, a stranger's draft could do anything."""
    folder, goal = write(tmp_path / "draft", tensors_of(head_of()), files="pytorch_model.bin"), tmp_path / "made"
    if plain:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Payload(goal)}))
    else:
        torch.save({"fc.weight": Payload(goal)}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin is corrupt or unsafe" in refusal(folder)
    assert not goal.exists()


def test_a_bin_that_holds_something_else_is_told(tmp_path: Path) -> None:
    """A training state or a list is no dictionary of tensors."""
    folder = write(tmp_path / "draft", tensors_of(head_of()), files="pytorch_model.bin")
    for content in ({"model": tensors_of(head_of())}, [torch.ones(2)], {"step": 3}):
        torch.save(content, folder / "pytorch_model.bin")
        assert "not a plain dictionary of tensors" in refusal(folder)


def test_fit_is_judged_before_the_head_is_built(tmp_path: Path) -> None:
    """A draft for another target is told as that, not as some misshapen tensor."""
    other = head_of(hidden_size=64, head_dim=16)
    read = read_checkpoint(write(tmp_path / "draft", tensors_of(other), {**CONFIG, "hidden_size": 64}))
    with pytest.raises(EyasError, match="made for a target of hidden size 64, but it has 32"):
        check_fit(read, HIDDEN, VOCABULARY, "it")
    check_fit(read, 64, VOCABULARY, "it")
