"""The training objective: a decoder and the loss on top of it, as one module.

One module, so that whatever wraps the model (FSDP's gathering hooks above all) also covers the
head's weight, which the loss reads outside the decoder's own forward.
"""

from __future__ import annotations

# B batch, S sequence, D hidden, V vocabulary
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.model.attention_backend import AttentionBackend, CausalAttention, PackedAttention
from fivefold.model.decoder import Decoder

Attend = Callable[[Tensor | None, Tensor | None], AttentionBackend]


def whole_sequences(documents: Tensor | None, places: Tensor | None) -> AttentionBackend:
    """Attention where every rank has all tokens of its sequences."""
    return CausalAttention() if documents is None else PackedAttention(documents)


def whole_vocabulary(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """The loss SUM of hidden states [B,S,D] where every rank has all rows of the head."""
    return linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), **options)


class Objective(nn.Module):
    """Next-token cross-entropy. Returns the SUM over targets: the caller knows the global count.

    `attend` makes the attention backend of a micro-batch, `cross_entropy` the loss: the axes that
    divide sequences and the vocabulary put their own here.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        z_loss: float = 0.0,
        chunk: int = 256,
        attend: Attend = whole_sequences,
        cross_entropy: Callable[..., Tensor] = whole_vocabulary,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.z_loss = z_loss
        self.chunk = chunk
        self.attend = attend
        self.cross_entropy = cross_entropy

    def stage(self, here: range) -> Objective:
        """This objective with some of the blocks; see `Decoder.stage`."""
        return Objective(
            self.decoder.stage(here),
            z_loss=self.z_loss,
            chunk=self.chunk,
            attend=self.attend,
            cross_entropy=self.cross_entropy,
        )

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        places: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """[B,S] int64 each; labels of -100 have no target. Returns the fp32 loss sum.

        `places` [S]: where in its row each token stands, if the row is divided. A stage after
        the first takes `hidden` [B,S,D] of the one before; one before the last returns its own.
        """
        if hidden is None:
            hidden = self.decoder.embed(tokens)
        hidden = self.decoder.run(hidden, positions, self.attend(documents, places))
        if self.decoder.norm is None:
            return hidden
        return self.cross_entropy(
            self.decoder.norm(hidden),
            self.decoder.head_weight(),
            labels,
            softcap=self.decoder.config.logit_softcap,
            z_loss=self.z_loss,
            chunk=self.chunk,
        )
