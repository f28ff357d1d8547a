"""From token ids to text while it grows: whole characters only, and stop strings wherever they fall."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what a tokenizer puts for the bytes of an incomplete character


class TextStream:
    """Decodes one request's tokens as they come.

    Text is given out once it can no longer change: bytes of an unfinished character are held back, and so is whatever might
    turn out to begin a stop string. The pieces concatenate to `text`.

    Args:
        tokenizer: None decodes to empty text (token ids in, token ids out).
        stop: stop strings; the text ends before the first one found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: list[str] | None = None) -> None:
        self.tokenizer = tokenizer
        self.stop = stop or []
        self.ids: list[int] = []
        self.text = ""  # decoded so far, whole characters, cut at a stop string
        self.given = 0  # characters of it given out
        self.stopped = False
        self._window = 0  # tokens before this one are decoded for good and give context no more
        self._decoded = 0  # tokens before this one end in a whole character, which is in `text`
        self._taken = 0  # characters of the window's text that are in `text`

    def push(self, token: int) -> bool:
        """Take in one token; True when it completes a stop string."""
        self.ids.append(token)
        self._advance(final=False)
        return self.stopped

    def _advance(self, final: bool) -> None:
        """Append the whole characters of tokens not yet decoded, in the context of the window before them."""
        fresh = self._decode(self.ids[self._window :])
        whole = fresh if final else fresh.rstrip(UNFINISHED)
        if len(whole) <= self._taken:
            return
        before = len(self.text)
        self.text += whole[self._taken :]
        self._taken = len(whole)
        if whole == fresh:
            self._window, self._decoded = self._decoded, len(self.ids)
            self._taken = len(self._decode(self.ids[self._window :]))
        self._find_stop(before)

    def _decode(self, ids: list[int]) -> str:
        if self.tokenizer is None or not ids:
            return ""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _find_stop(self, before: int) -> None:
        """Cut at the earliest stop string that ends in text added since ``before``."""
        found = [place for stop in self.stop if (place := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def piece(self) -> str:
        """The next text that is safe to show."""
        end = len(self.text) if self.stopped else len(self.text) - self._held()
        piece, self.given = self.text[self.given : end], max(self.given, end)
        return piece

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        return max(
            (
                size
                for size in range(1, min(longest, len(self.text)) + 1)
                if any(stop.startswith(self.text[-size:]) for stop in self.stop)
            ),
            default=0,
        )

    def finish(self) -> str:
        """End of the request: everything held back, an incomplete last character included."""
        if not self.stopped:
            self._advance(final=True)
        piece, self.given = self.text[self.given :], len(self.text)
        return piece
