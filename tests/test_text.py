"""Streaming text against decoding all tokens at once, and stop strings against a search of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eyas.text import UNFINISHED, TextStream
from tests.helpers import few, many

SAMPLE = "a naïve e\u0301tude 🙂🙃 👩‍👩‍👧 家族 日本語 STOP. END\n\n"
END = "<end>"


@cache
def bytes_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE whose merges cross words and characters: among them a space with an emoji's first bytes."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    corpus = [SAMPLE, " 🙂 🙃 🙂 🙃", "家 族 家", "STOP STOPS ENDEND", ". .. ..."] * 4
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)


@cache
def pieces_tokenizer() -> PreTrainedTokenizerBase:
    """A sentencepiece-like BPE with byte fallback and a stripped first space, as Llama's."""
    known = ["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"STOPENDabe.", "▁a", "ST", "▁E"]
    vocabulary = {token: place for place, token in enumerate(known)}
    merges = [("▁", "a"), ("S", "T"), ("▁", "E")]
    bpe = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def byte_ids(raw: bytes) -> list[int]:
    """One token for each byte."""
    tokenizer = bytes_tokenizer()
    alone = {decode_byte(token): token for token in map(tokenizer.convert_tokens_to_ids, alphabet())}
    return [alone[byte] for byte in raw]


@cache
def alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


@cache
def decode_byte(token: int) -> int:
    """The byte a single-byte token stands for, in GPT-2's table: printable bytes are themselves, the others come after."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    code = ord(bytes_tokenizer().convert_ids_to_tokens(token))
    return code if code < 256 else others[code - 256]


def run(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, int, list[str]]:
    """Push tokens until a stop string: the text, the tokens taken, and the pieces given on the way."""
    stream, pieces = TextStream(tokenizer, list(stop)), []
    for token in ids:
        stopped = stream.push(token)
        assert stopped == stream.stopped
        pieces.append(stream.piece())
        if stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text, "the pieces concatenate to the text"
    assert stream.finish() == "" == stream.piece(), "nothing is given twice"
    return stream.text, len(stream.ids), pieces


def reference(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, int]:
    """The text up to the first stop string that is complete as tokens are pushed one at a time, and the tokens taken."""
    for count in range(1, len(ids) + 1):
        whole = decode(tokenizer, ids[:count]).rstrip(UNFINISHED)  # an unfinished character is not text yet
        found = [whole.find(one) for one in stop if one in whole]
        if found:
            return whole[: min(found)], count
    whole = decode(tokenizer, ids)
    return whole[: min([whole.find(one) for one in stop if one in whole], default=len(whole))], len(ids)


# --- whole characters


def test_the_tokenizer_is_as_hard_as_it_should_be() -> None:
    """Characters are split over tokens, and a token joins a space with the beginning of a character."""
    tokenizer = bytes_tokenizer()
    ids = encode(tokenizer, SAMPLE + "日🙂é")
    assert decode(tokenizer, ids) == SAMPLE + "日🙂é"
    alone = [decode(tokenizer, [token]) for token in range(len(tokenizer))]
    assert any(text.endswith(UNFINISHED) and text.startswith(" ") for text in alone)
    assert any(UNFINISHED in decode(tokenizer, [token]) for token in ids)


@pytest.mark.parametrize("make", [bytes_tokenizer, pieces_tokenizer])
def test_streaming_never_splits_a_character(make: object) -> None:
    """A piece with half a character would show replacement marks that the text does not have."""
    tokenizer = make()  # type: ignore[operator]
    text = "a be 家族 🙂👩‍👩‍👧 e\u0301 naïve. STOP"
    ids = encode(tokenizer, text)
    got, _, pieces = run(tokenizer, ids)
    assert got == decode(tokenizer, ids) == text
    assert not any(UNFINISHED in piece for piece in pieces)
    assert sum(map(bool, pieces)) > len(text) / 4, "text comes as it grows, not at the end"


def test_text_is_given_as_soon_as_it_is_whole() -> None:
    """Holding back more than the unfinished character makes streaming stutter."""
    stream = TextStream(bytes_tokenizer())
    given_out = []
    for token in byte_ids("aé🙂b".encode()):
        stream.push(token)
        given_out.append(stream.piece())
    assert given_out == ["a", "", "é", "", "", "", "🙂", "b"]


def test_a_truncated_character_is_flushed_at_the_end() -> None:
    """Bytes of a last, incomplete character are part of the decoded text; dropping them loses text."""
    tokenizer = bytes_tokenizer()
    for raw in ("x🙂".encode()[:-1], "🙂".encode()[:1], b"ab\xff", "é".encode()[:1] + b"a" + "家".encode()[:2]):
        ids = byte_ids(raw)
        text, _, pieces = run(tokenizer, ids)
        assert text == decode(tokenizer, ids) and text.endswith(UNFINISHED) == (pieces[-1] != "")


def test_special_tokens_are_skipped_and_harmless() -> None:
    """An end or other special token inside the stream gives no text, and costs none of its neighbours'."""
    tokenizer = bytes_tokenizer()
    end = tokenizer.eos_token_id
    half, rest = byte_ids("🙂".encode()[:2]), byte_ids("🙂".encode()[2:])
    for ids in ([end], [end, end, *byte_ids(b"a")], [*byte_ids(b"a"), end, *byte_ids(b"b"), end], [*half, end, *rest, end]):
        text, _, _ = run(tokenizer, ids)
        assert text == decode(tokenizer, ids)
        assert END not in text


def test_a_leading_space_is_stripped_once() -> None:
    """Decoders that strip the text's first space must not strip one inside the text, where a window begins."""
    tokenizer = pieces_tokenizer()
    space, letter = tokenizer.convert_tokens_to_ids(["▁", "a"])
    word = tokenizer.convert_tokens_to_ids("▁a")
    for ids in ([word, word, word], [space, space, letter, space, word, word], [letter, space, space, space, word]):
        assert run(tokenizer, ids)[0] == decode(tokenizer, ids)


TOKENS = st.lists(st.integers(0, 299), max_size=24)
TEXTS = st.lists(st.sampled_from([*SAMPLE, "🙂", " 🙂", "家", "STOP", " ", "é"]), max_size=24).map("".join)


@many
@given(TOKENS)
def test_any_tokens_stream_to_their_text(ids: list[int]) -> None:
    """Random tokens are mostly broken characters: text must neither be lost nor doubled, whatever the bytes."""
    tokenizer = bytes_tokenizer()
    ids = [token % len(tokenizer) for token in ids]
    assert run(tokenizer, ids)[0] == decode(tokenizer, ids)


@few
@given(TEXTS)
def test_any_text_streams_whole_with_byte_fallback(text: str) -> None:
    """The same for tokenizers with byte fallback."""
    tokenizer = pieces_tokenizer()
    ids = encode(tokenizer, text)
    got, _, pieces = run(tokenizer, ids)
    assert got == decode(tokenizer, ids)
    assert not any(UNFINISHED in piece for piece in pieces)


def test_no_tokenizer_no_text() -> None:
    """Token ids in, token ids out; stop strings cannot occur."""
    assert run(None, [1, 2, 3], ["a"]) == ("", 3, ["", "", "", ""])


# --- stop strings


def characters(text: str) -> list[int]:
    """Tokens of a text, one byte each."""
    return byte_ids(text.encode())


def test_a_stop_string_across_token_borders_is_found() -> None:
    """It rarely is a token of its own."""
    text, count, pieces = run(bytes_tokenizer(), characters("one STOP two"), ["STOP"])
    assert (text, count) == ("one ", len("one STOP"))
    assert pieces == ["o", "n", "e", " ", "", "", "", "", ""], "no part of the stop string leaks"


def test_a_stop_string_inside_one_token_is_found() -> None:
    """It may begin and end anywhere in a token; what follows it in the token is dropped."""
    tokenizer = bytes_tokenizer()
    token = next(t for t in range(len(tokenizer)) if "STOP" in decode(tokenizer, [t]))
    whole = decode(tokenizer, [token])
    text, count, _ = run(tokenizer, [*characters("ab"), token, *characters("cd")], ["TO"])
    assert (text, count) == ("ab" + whole[: whole.index("TO")], 3)


def test_a_false_start_is_given_out_later() -> None:
    """Text held back as a possible stop string must come once it turns out to be none, or at the end."""
    _, _, pieces = run(bytes_tokenizer(), characters("aSTOaSTSTOPx"), ["STOP"])
    assert pieces == ["a", "", "", "", "STOa", "", "", "ST", "", "", "", ""]
    _, _, pieces = run(bytes_tokenizer(), characters("aSTO"), ["STOP"])
    assert pieces == ["a", "", "", "", "STO"]


def test_of_several_stop_strings_the_first_complete_one_wins() -> None:
    """Longer ones that begin earlier but end later are not there yet; among those one token completes, the earliest."""
    tokenizer = bytes_tokenizer()
    assert run(tokenizer, characters("xabcdy"), ["abcd", "bc"])[:2] == ("xa", 4)
    assert run(tokenizer, characters("xabcdy"), ["zz", "cd", "xyz"])[:2] == ("xab", 5)
    assert run(tokenizer, characters("xabab"), ["abab", "b"])[:2] == ("xa", 3)
    token = next(t for t in range(len(tokenizer)) if "STOP" in decode(tokenizer, [t]))
    whole = decode(tokenizer, [token])
    for stop in (["OP", "STOP"], ["STOP", "OP"], ["P", "ST", "OP"]):
        assert run(tokenizer, [token], stop)[0] == whole[: whole.index("ST")]


def test_overlapping_beginnings_are_held_back() -> None:
    """After a false start the stop string may have begun inside it."""
    text, count, pieces = run(bytes_tokenizer(), characters("aabaabaac"), ["aabaac"])
    assert (text, count) == ("aab", 9)
    assert pieces == ["", "", "", "", "", "aab", "", "", "", ""]


def test_a_stop_string_at_either_end_of_the_text_is_found() -> None:
    """With nothing before it, and with nothing after it."""
    assert run(bytes_tokenizer(), characters("STOPx"), ["STOP"])[:2] == ("", 4)
    assert run(bytes_tokenizer(), characters("xSTOP"), ["STOP"])[:2] == ("x", 5)


def test_a_stop_string_before_an_unfinished_character_is_found_at_once() -> None:
    """One token may complete the stop string and begin a character: waiting for the character's end would emit tokens
    past the stop string."""
    tokenizer = bytes_tokenizer()
    token = next(t for t in range(len(tokenizer)) if decode(tokenizer, [t]) == " " + UNFINISHED)
    stream = TextStream(tokenizer, ["a "])
    assert [stream.push(part) for part in [*characters("ba"), token]] == [False, False, True]
    assert stream.text == "b"


def test_stop_strings_of_many_bytes() -> None:
    """A stop string may itself be split inside its characters."""
    assert run(bytes_tokenizer(), characters("a家族b"), ["族"])[:2] == ("a家", 7)
    assert run(bytes_tokenizer(), characters("e\u0301x"), ["\u0301"])[:2] == ("e", 3)


def test_a_stop_string_in_the_last_flush_is_cut() -> None:
    """What the end of the request flushes is searched too."""
    stream = TextStream(bytes_tokenizer(), [UNFINISHED])
    assert not any(stream.push(token) for token in byte_ids("a🙂".encode()[:-1]))
    assert (stream.piece(), stream.finish(), stream.text, stream.stopped) == ("a", "", "a", True)


def test_a_stop_string_that_a_special_token_completes_is_none() -> None:
    """Special tokens have no text, so they neither complete nor break a stop string."""
    end = bytes_tokenizer().eos_token_id
    ids = [*characters("aST"), end, *characters("OPb")]
    assert run(bytes_tokenizer(), ids, ["STOP"])[:2] == ("a", 6)
    assert run(bytes_tokenizer(), ids, [END])[:2] == ("aSTOPb", 7)


@many
@given(st.data())
def test_stop_strings_equal_a_search_of_the_whole_text(data: st.DataObject) -> None:
    """Whatever the tokens and the stop strings: text, tokens taken and pieces."""
    tokenizer = bytes_tokenizer()
    raw = data.draw(st.lists(st.sampled_from([b"a", b"b", b"ab", b" ", "é".encode(), "🙂".encode(), b"\xf0", b"\x9f"])))
    ids = data.draw(st.sampled_from([byte_ids(b"".join(raw)), encode(tokenizer, b"".join(raw).decode(errors="ignore"))]))
    ids += [token % len(tokenizer) for token in data.draw(TOKENS)]
    whole = decode(tokenizer, ids)
    inside = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 5)).map(lambda cut: whole[cut[0] :][: cut[1]])
    stops = data.draw(st.lists(st.one_of(inside, st.text("ab é🙂", min_size=1, max_size=4)).filter(bool), max_size=3))
    text, count, pieces = run(tokenizer, ids, stops)
    assert (text, count) == reference(tokenizer, ids, stops)
    assert not any(stop in text for stop in stops)
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.startswith(shown), "what was given out stays"


@few
@given(TEXTS, st.lists(st.sampled_from(["STOP", "TO", "OP.", " E", "a", "END", "🙂", "族 ", ". "]), max_size=3))
@example(SAMPLE, ["END"])
def test_stop_strings_do_not_depend_on_the_tokens(text: str, stops: list[str]) -> None:
    """Split finely or coarsely, the text ends before the same stop string where no two end at once."""
    tokenizer = bytes_tokenizer()
    coarse, _, _ = run(tokenizer, encode(tokenizer, text), stops)
    fine, _, _ = run(tokenizer, characters(text), stops)
    assert fine.startswith(coarse) if len(stops) > 1 else fine == coarse
