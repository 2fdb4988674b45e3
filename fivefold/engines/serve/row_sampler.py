"""Sampling where requests come and go between steps.

What a request's rows need lives here under its id for as long as it lives, put back or running.
Settings are gathered into columns when the set of rows changes, not in every step; histories for
penalties stay where they are, and only rows that have penalties touch them. See `sampler.py` for
the order of operations, which is the same.
"""

# B rows of this step, V vocabulary, P rows with penalties

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import PromptError
from fivefold.engines.serve.columns import Columns
from fivefold.engines.serve.filters import draw, likeliest
from fivefold.engines.serve.histories import Histories
from fivefold.engines.serve.logprobs import Logprob, report
from fivefold.engines.serve.random_stream import fresh_seed, uniform
from fivefold.engines.serve.sampler import no_numbers_error, not_numbers
from fivefold.engines.serve.sampling_params import SEED_LIMIT, SamplingParams
from fivefold.engines.serve.structured.grammars import Grammars
from fivefold.engines.serve.structured.mask import mask_, stuck, stuck_error


@dataclass(frozen=True, slots=True)
class SampledRows:
    """[B] token ids, {token id: Logprob} for rows that ask, and why rows have no token."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob] | None]
    broken: Mapping[int, PromptError]


@dataclass(slots=True)
class _Row:
    params: SamplingParams
    seed: int
    endings: list[int]  # may not be chosen before min_tokens
    matcher: Any = None  # of the answer's form, how far it has come
    steps: int = 0


@dataclass(slots=True)
class _Batch:
    """What follows from which rows are there."""

    ids: tuple[int, ...]
    rows: list[_Row]
    columns: Columns
    asked: list[int | None]
    bias: tuple[Tensor, Tensor, Tensor] | None  # rows, tokens, what is added
    penalised: list[int]  # places in the batch
    bound: list[tuple[int, Any]]  # places of answers with a form, and their matchers
    has_minimum: bool
    early: list[int] = field(default_factory=list)  # places before their min_tokens
    forbidden: tuple[Tensor, Tensor] | None = None  # rows, tokens: of those


class RowSampler:
    """Samples any rows of logits, each for the request that its id names."""

    def __init__(
        self,
        vocab_size: int,
        end_tokens: Sequence[int] = (),
        device: torch.device | str = "cpu",
        grammars: Grammars | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.end_tokens = tuple(end_tokens)
        self.histories = Histories(vocab_size, self.device)
        self.grammars = grammars or Grammars(None, vocab_size, end_tokens)
        self._rows: dict[int, _Row] = {}
        self._batch: _Batch | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, id: int, params: SamplingParams, prompt: Sequence[int], index: int = 0) -> None:
        """A request that will be sampled; `index` is which of its n answers.

        Raises PromptError for a form that cannot be read (see `Grammars`).
        """
        form = params.structured_outputs
        matcher = None if form is None else self.grammars.matcher(form)
        seed = fresh_seed() if params.seed is None else (params.seed + index) % SEED_LIMIT
        endings = sorted({*self.end_tokens, *params.stop_token_ids})
        self._rows[id] = _Row(params, seed, endings, matcher)
        if params.uses_history:
            self.histories.add(id, params, prompt)

    def remove(self, id: int) -> None:
        """The request has ended."""
        del self._rows[id]
        self.histories.remove(id)
        if self._batch is not None and id in self._batch.ids:
            self._batch = None

    def sample(self, logits: Tensor, ids: Sequence[int]) -> SampledRows:
        """[B,V] fp32 logits of the requests `ids` -> their next tokens."""
        batch = self._gather(tuple(ids))
        adjusted = self._adjust(logits, batch)
        chosen = likeliest(adjusted)
        broken = self._broken(adjusted, chosen, batch)
        if not batch.columns.all_greedy:
            drawn = draw(batch.columns.filter(adjusted), self._uniforms(batch))
            # Drawing from NaN runs off the end.
            drawn = drawn.clamp(max=logits.shape[-1] - 1)
            chosen = torch.where(batch.columns.greedy, chosen, drawn)
        if batch.penalised:
            self.histories.record(
                [batch.ids[place] for place in batch.penalised], chosen[batch.penalised]
            )
        for row in batch.rows:
            row.steps += 1
        tokens = chosen.tolist()
        for place, matcher in batch.bound:
            if place not in broken and not matcher.accept_token(tokens[place]):
                raise RuntimeError(f"token {tokens[place]} is against the form that allowed it")
        return SampledRows(tokens, report(logits, chosen, batch.asked), broken)

    def _broken(self, adjusted: Tensor, largest: Tensor, batch: _Batch) -> dict[int, PromptError]:
        """Rows that nothing can be chosen for."""
        found = not_numbers(adjusted, largest)
        broken = {}
        if bool(found.any()):
            broken = dict.fromkeys(found.nonzero()[:, 0].tolist(), no_numbers_error())
        if batch.bound:
            most = adjusted.gather(-1, largest[:, None])[:, 0]
            broken |= dict.fromkeys(stuck(most, batch.bound), stuck_error())
        return broken

    def _gather(self, ids: tuple[int, ...]) -> _Batch:
        """What these rows share, kept while the same ones come again."""
        if self._batch is None or self._batch.ids != ids:
            rows = [self._rows[id] for id in ids]
            params = [row.params for row in rows]
            self._batch = _Batch(
                ids=ids,
                rows=rows,
                columns=Columns.of(params, self.device),
                asked=[p.reported for p in params],
                bias=self._bias(params),
                penalised=[place for place, p in enumerate(params) if p.uses_history],
                bound=[(place, row.matcher) for place, row in enumerate(rows) if row.matcher],
                has_minimum=any(p.min_tokens for p in params),
            )
        return self._batch

    def _bias(self, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor, Tensor] | None:
        entries = [
            (place, token, value)
            for place, p in enumerate(params)
            for token, value in p.logit_bias.items()
        ]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return self._indices(rows), self._indices(tokens), torch.tensor(values, device=self.device)

    def _adjust(self, logits: Tensor, batch: _Batch) -> Tensor:
        """Bias, masks and penalties: [B,V] -> [B,V], the input left as it is."""
        forbidden = self._forbidden(batch) if batch.has_minimum else None
        changed = batch.bias is not None or forbidden is not None
        if changed or batch.penalised or batch.bound:
            logits = logits.clone()
        if batch.bias is not None:
            rows, tokens, values = batch.bias
            logits.index_put_((rows, tokens), values.to(logits.dtype), accumulate=True)
        if forbidden is not None:
            logits[forbidden] = float("-inf")
        if batch.bound:
            mask_(logits, batch.bound)
        if batch.penalised:
            ids = [batch.ids[place] for place in batch.penalised]
            logits[batch.penalised] = self.histories.apply(ids, logits[batch.penalised])
        return logits

    def _forbidden(self, batch: _Batch) -> tuple[Tensor, Tensor] | None:
        """Rows and tokens that may not be chosen yet; made anew when a row comes of age."""
        early = [p for p, row in enumerate(batch.rows) if row.steps < row.params.min_tokens]
        if early != batch.early:
            entries = [(place, token) for place in early for token in batch.rows[place].endings]
            rows, tokens = [e[0] for e in entries], [e[1] for e in entries]
            batch.early = early
            batch.forbidden = (self._indices(rows), self._indices(tokens)) if entries else None
        return batch.forbidden

    def _uniforms(self, batch: _Batch) -> Tensor:
        numbers = [0.0 if row.params.greedy else uniform(row.seed, row.steps) for row in batch.rows]
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
