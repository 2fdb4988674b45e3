"""What an engine serves: a decoder in this process, or parts of one on several ranks."""

from __future__ import annotations

# N tokens, D hidden, V vocabulary, W rows whose logits are wanted
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.engines.serve.paged.cache import PagedCache
from fivefold.engines.serve.paged.lowered import LoweredDecoder
from fivefold.engines.serve.paged.runner import PagedRunner
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.engines.serve.paged.weights import ServedWeights
from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.kernels import dispatch
from fivefold.model.attention_backend import CausalAttention
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder


class Runner(Protocol):
    """Computes the steps that a scheduler plans."""

    def hidden(self, plan: StepPlan, whole: Collection[int] = ()) -> Tensor:
        """Compute a step: a row [W, ...] for each wanted token, which `logits` takes.

        In one process rows are hidden states; elsewhere they may stand for those.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Some or all rows of the last step to [W,V] fp32."""

    def logits_in_pieces(self, hidden: Tensor) -> Iterator[Tensor]:
        """The same, a few rows at a time."""


class Weights(Protocol):
    """Changes weights, and gives memory back; see ServedWeights."""

    @property
    def sleeping(self) -> int:
        """0 awake; 1 without memory for keys and values; 2 without weights either."""

    def update(self, state: Mapping[str, Tensor], partial: bool = False) -> None:
        """Copy new weights into the model's."""

    def sleep(self, level: int) -> None:
        """Give memory back."""

    def wake_up(self, state: Mapping[str, Tensor] | None) -> None:
        """Take the memory again."""

    def repack(self) -> None:
        """Bring what is packed beside the weights up to date with them."""


class Served(Protocol):
    """A loaded model with a cache, ready to run."""

    config: ModelConfig
    parameters: int
    """Of the whole model."""
    dtype: torch.dtype
    device: torch.device
    blocks: int
    """Of the cache."""
    why_modules: str | None
    """Why steps walk the decoder's modules; None: they are one native call each."""
    ended: FivefoldError | None
    """Why it can run no more."""

    @property
    def decoder(self) -> Decoder:
        """What this process holds of the model."""

    @property
    def runner(self) -> Runner:
        """Runs its steps."""

    @property
    def weights(self) -> Weights:
        """Changes its weights."""

    @property
    def watched(self) -> Sequence[Connection]:
        """Readable when something has ended; then `notice` says what."""

    def notice(self) -> None:
        """Set `ended`, if something has."""

    def states(self, prompt: Sequence[int]) -> Tensor:
        """Hidden states [N,D] of a prompt after the final norm, without the cache."""

    def close(self) -> None:
        """End what runs beside this process."""


class ServedDecoder:
    """A decoder in this process. Raises MemoryBudgetError when it leaves no room for a cache."""

    ended: FivefoldError | None = None
    watched: Sequence[Connection] = ()

    def __init__(self, decoder: Decoder, settings: EngineSettings) -> None:
        self.config = decoder.config
        self.decoder = decoder
        self.parameters = sum(p.numel() for p in decoder.parameters())
        weight = decoder.head_weight()
        self.dtype, self.device = weight.dtype, weight.device
        self.why_modules = settings.why_no_native_step(decoder)
        lowered = None
        # Packed before memory is measured, which that takes.
        if self.why_modules is None:
            lowered = LoweredDecoder(decoder, settings.weights)
        elif dispatch.is_deterministic():
            decoder.pack()  # or every product would
        self.blocks = settings.blocks(decoder, lowered)
        cache = PagedCache(
            decoder.config, self.blocks, settings.block_size, settings.kv_format(decoder),
            self.device,
        )  # fmt: skip
        self.runner = PagedRunner(decoder, cache, lowered)
        self.weights = ServedWeights(self.runner)

    def notice(self) -> None:
        """Nothing ends but with this process."""

    @torch.inference_mode()
    def states(self, prompt: Sequence[int]) -> Tensor:
        """See Served."""
        tokens = torch.tensor([list(prompt)], device=self.device)
        positions = torch.arange(len(prompt), device=self.device)[None]
        return self.decoder(tokens, positions, CausalAttention())[0]

    def close(self) -> None:
        """Nothing runs elsewhere."""
