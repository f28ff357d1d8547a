"""What a run changes, step by step: the head, its running mean, the optimiser, the best head so far."""

from __future__ import annotations

import copy
import math
import time
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import reduce
from rich.console import Console
from torch import Tensor

from eyas.checkpoint import read_checkpoint, save_head
from eyas.errors import EyasError
from eyas.files import can_draw
from eyas.heads.eagle import EagleHead, HeadConfig
from eyas.target import Target
from eyas.training.curves import Curves
from eyas.training.data import Batch, collate, groups, supervised_pairs
from eyas.training.dataset import Dataset
from eyas.training.decoding import Decoded, decode_prompts
from eyas.training.evaluate import Report, evaluate
from eyas.training.features import FeatureSource
from eyas.training.objective import Objective
from eyas.training.options import TrainOptions
from eyas.training.order import Position, Step, steps
from eyas.training.readout import read_head
from eyas.training.start import draft_vocabulary_size, head_from, starting_head
from eyas.training.state import describe_run, load_state, remove_state, save_state
from eyas.training.storage import GIB, feature_bytes, open_store
from eyas.training.vocabulary import draft_vocabulary


@dataclass(frozen=True)
class Evaluation:
    """A head, measured.

    Attributes:
        step: optimiser steps it was trained.
        report: teacher-forced, on all held-out conversations.
        decoded: real decoding of some of their prompts; None where that was not possible.
    """

    step: int
    report: Report
    decoded: Decoded | None

    @property
    def score(self) -> float:
        """What the best head has most of: decoded τ, or its teacher-forced estimate."""
        return self.report.tree if self.decoded is None else self.decoded.tau

    def __str__(self) -> str:
        return f"step {self.step}: {self.report}" + (f"  {self.decoded}" if self.decoded else "")


class Trainer:
    """A run in one process; `eyas.training.loop.train` drives it.

    Attributes:
        position: how far the run has got in its data.
        steps_done: optimiser steps taken.
        best: evaluation of the head that is in ``options.out``.
    """

    def __init__(
        self, accelerator: Accelerator, target: Target, dataset: Dataset, options: TrainOptions, console: Console
    ) -> None:
        self.accelerator, self.target, self.dataset = accelerator, target, dataset
        self.options, self.console = options, console
        for note in dataset.notes:
            self.say(note)
        store, choice = open_store(target, dataset.samples, options)
        self.say(choice)
        self.source = FeatureSource(target, dataset.samples, options.batch_tokens, store)
        fits = store is not None and feature_bytes(target, dataset.heldout) <= options.feature_memory * GIB
        self.heldout_source = FeatureSource(target, dataset.heldout, options.batch_tokens, {} if fits else None)
        self.trained = [int(supervised_pairs(sample).sum()) for sample in dataset.samples]
        self.run = describe_run(target, dataset, options)
        self.position, self.steps_done, self.evaluated = Position(), 0, 0
        self.best: Evaluation | None = None
        if options.resume is False and accelerator.is_main_process:
            remove_state(options.out)  # else a kill before the first save would leave the old run to be continued
        state = None if options.resume is False else load_state(options.out, self.run)
        if options.resume and state is None:
            self.say(f"no unfinished run in {options.out}: starting at the beginning")
        torch.manual_seed(options.seed)
        self.token_map, self.head = self._restored(state) if state else self._started()
        self.readout = read_head(target, self.token_map)
        optimiser = torch.optim.AdamW(
            [
                {"params": [p for p in self.head.parameters() if p.ndim > 1], "weight_decay": options.weight_decay},
                {"params": [p for p in self.head.parameters() if p.ndim == 1], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )
        objective = Objective(self.head, target, self.token_map, options)
        self.objective, self.optimiser = accelerator.prepare(objective, optimiser, device_placement=[False, False])
        self.average = copy.deepcopy(self.head)  # after prepare, which makes all processes start alike
        if state:
            self.average.load_state_dict(state["average"])
            self.optimiser.load_state_dict(state["optimiser"])
        self.began = time.monotonic() - 60 * (state["minutes"] if state else 0.0)
        self.curves = Curves(accelerator, options.out, self.steps_done)
        self.say(
            f"{len(dataset.samples)} conversations, {sum(self.trained)} trained tokens, "
            f"draft vocabulary {len(self.readout.rows)}"
            + (f"; continuing after step {self.steps_done} (--no-resume starts anew)" if state else "")
        )

    @property
    def minutes(self) -> float:
        """How long the run has taken, earlier parts of it included."""
        return (time.monotonic() - self.began) / 60

    def say(self, text: str) -> None:
        """One line for the user, as it is; nothing where this is not the main process."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: Step, rate: float) -> float:
        """One optimiser step; returns its loss, averaged over the trained positions of all its micro-batches."""
        accelerator, rank, count = self.accelerator, self.accelerator.process_index, self.accelerator.num_processes
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        positions = sum(self.trained[place] for group in step.groups for place in group)
        # a process for which nothing is left computes the first micro-batch for nothing: all must meet in the backward pass
        own = list(range(len(step.groups)))[rank::count] or [0]
        weight = (count if rank < len(step.groups) else 0) / positions  # gradients are averaged over processes
        loss = torch.zeros((), device=self.target.device)
        for micro in own:
            batch = self.batch(step.groups[micro])
            with nullcontext() if micro == own[-1] else accelerator.no_sync(self.objective):
                part = self.objective(batch, self.source(batch), step.number + micro) * weight
                accelerator.backward(part)
            loss += part.detach() / count
        norm = accelerator.clip_grad_norm_(self.objective.parameters(), self.options.clip)
        value = float(reduce(loss, "sum") if count > 1 else loss)
        if not (math.isfinite(value) and math.isfinite(float(norm))):  # before it gets into the weights
            what = f"{value}" if not math.isfinite(value) else f"{value}, its gradient {float(norm)}"
            raise EyasError(
                f"the loss of step {self.steps_done + 1} is {what}; start anew (--no-resume) with a lower --learning-rate"
            )
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.steps_done, self.position = self.steps_done + 1, step.after
        decay = min(self.options.average, self.steps_done / (self.steps_done + 10))
        with torch.no_grad():
            for mean, current in zip(self.average.parameters(), self.head.parameters(), strict=True):
                mean.lerp_(current, 1 - decay)
        self.curves.add(self.steps_done, {"loss": value})
        return value

    def batch(self, group: list[int]) -> Batch:
        """The samples of a micro-batch, on the target's device."""
        return collate(self.dataset.samples, group).to(self.target.device)

    def evaluate(self) -> Evaluation:
        """Measure the running mean on the held-out conversations."""
        heldout, target = self.dataset.heldout, self.target
        found = groups(heldout, self.options.batch_tokens)
        moved = (collate(heldout, group).to(target.device) for group in found)
        observed = ((batch, self.heldout_source(batch)) for batch in moved)
        report = evaluate(self.average, observed, target, self.readout, self.token_map)
        decoded = decode_prompts(target, self.average, self.token_map, self.dataset.prompts, self.options.eval_tokens)
        return Evaluation(self.steps_done, report, decoded)

    def keep_best(self) -> None:
        """Evaluate, and write the head if it is the best so far; only the main process does."""
        self.evaluated = self.steps_done
        if not self.accelerator.is_main_process:
            return
        found = self.evaluate() if self.dataset.heldout else None
        if found is not None:
            self.say(str(found))
            tau, acceptance = (found.decoded.tau, found.decoded.acceptance) if found.decoded else (None, None)
            values = {"tau": tau, "acceptance": acceptance, "tree": found.report.tree, "chain": found.report.chain}
            self.curves.add(self.steps_done, values)
        if found is None or self.best is None or found.score > self.best.score:
            template = getattr(self.target.tokenizer, "chat_template", None)
            recorded = {"target": self.target.name, "chat_template": template, "steps": self.steps_done}
            save_head(self.average, self.options.out, self.token_map, {"eyas": recorded})
            self.best = found
        self.curves.draw()

    def save(self) -> None:
        """Write the run's state; only the main process does."""
        if self.accelerator.is_main_process:
            save_state(self.options.out, {
                "run": self.run, "steps_done": self.steps_done, "evaluated": self.evaluated,
                "position": list(astuple(self.position)), "minutes": self.minutes,
                "config": {**asdict(self.head.config), "rope": dict(self.head.config.rope)},
                "head": self.head.state_dict(), "average": self.average.state_dict(),
                "optimiser": self.optimiser.state_dict(), "token_map": self.token_map,
                "best": None if self.best is None else asdict(self.best),
            })  # fmt: skip

    def finish(self) -> Evaluation | None:
        """Evaluate the last weights, forget the state, and say what there is; returns the kept head's evaluation."""
        if self.evaluated < self.steps_done or not self.steps_done:
            self.keep_best()
        if self.accelerator.is_main_process:
            remove_state(self.options.out)
            if self.best is not None:
                self.say(f"kept the head of {self.best}")
            if not can_draw():
                self.say("matplotlib is not installed: the curves are in curves.jsonl alone")
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return self.best

    def _started(self) -> tuple[Tensor | None, EagleHead]:
        """The draft vocabulary [D] (None: all) and the head of a new run."""
        options, target = self.options, self.target
        if options.from_draft is not None:
            checkpoint = read_checkpoint(options.from_draft)
            token_map = checkpoint.token_map
            return None if token_map is None else token_map.to(target.device), head_from(checkpoint, target)
        size = draft_vocabulary_size(target, options)
        token_map = None
        if size is not None:
            token_map = draft_vocabulary(self.dataset.samples, size, target.vocab_size, target.eos_ids).to(target.device)
        order = (group for step in steps(self.dataset.samples, options) for group in step.groups)
        observed = ((batch, self.source(batch)) for batch in map(self.batch, order))
        return token_map, starting_head(target, options.start, size, observed)

    def _restored(self, state: dict[str, Any]) -> tuple[Tensor | None, EagleHead]:
        """The same from a saved state; position, counts and best evaluation too."""
        head = EagleHead(HeadConfig(**state["config"])).to(self.target.device)
        head.load_state_dict(state["head"])
        self.steps_done, self.evaluated = state["steps_done"], state["evaluated"]
        self.position = Position(*state["position"])
        if (best := state["best"]) is not None:
            decoded = Decoded(**best["decoded"]) if best["decoded"] else None
            self.best = Evaluation(best["step"], Report(**best["report"]), decoded)
        token_map = state["token_map"]
        return None if token_map is None else token_map.to(self.target.device), head
