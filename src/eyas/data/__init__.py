"""Making conversations in a target's own words, to train a draft on."""

from eyas.data.run import DataOptions, make_conversations

__all__ = ["DataOptions", "make_conversations"]
