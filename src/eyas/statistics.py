"""What a request's decoding did and cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Statistics:
    """Counts and times of one request. Only tokens delivered to the user count; the prefill's token and step do not enter τ.

    Attributes:
        steps: draft-and-verify steps (plain decoding: forwards after the prefill).
        delivered: for each step the tokens delivered, the target's own included.
        accepted: for each step the drafted tokens among them.
        depths: for each step the depth of its tree.
        prefill_seconds: prompt forward, the draft's included.
        draft_seconds, verify_seconds, rest_seconds: where the steps' time went; a batch's time counts for each row in it.
    """

    delivered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0

    def step(self, delivered: int, accepted: int, depth: int) -> None:
        """Record one step's outcome."""
        self.delivered.append(delivered)
        self.accepted.append(accepted)
        self.depths.append(depth)

    def spend(self, draft: float, verify: float, rest: float) -> None:
        """Add one step's seconds."""
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.rest_seconds += rest

    @property
    def steps(self) -> int:
        return len(self.delivered)

    @property
    def tau(self) -> float | None:
        """Mean tokens delivered per step; None where there was no step."""
        return sum(self.delivered) / self.steps if self.steps else None

    @property
    def acceptance(self) -> list[float | None]:
        """Conditional acceptance by depth: of the steps that got to depth d − 1 with a tree at least d deep, the share
        that accepted depth d too. A step that ended inside its branch was not asked for more. None: no step got there."""
        rates: list[float | None] = []
        for depth in range(1, max(self.depths, default=0) + 1):
            offered = [
                count
                for count, deep, delivered in zip(self.accepted, self.depths, self.delivered, strict=True)
                if deep >= depth and (count >= depth or (count == depth - 1 and delivered > count))
            ]
            rates.append(sum(count >= depth for count in offered) / len(offered) if offered else None)
        return rates

    @property
    def decode_seconds(self) -> float:
        """All steps together."""
        return self.draft_seconds + self.verify_seconds + self.rest_seconds

    @property
    def seconds(self) -> float:
        """Prefill and steps."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """Delivered tokens, the prefill's one included, over `seconds`."""
        return (sum(self.delivered) + 1) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tau": self.tau,
            "steps": self.steps,
            "accepted": self.accepted,
            "acceptance_by_depth": self.acceptance,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "rest_seconds": self.rest_seconds,
        }
