"""The training objective: a decoder and the loss on top of it, as one module.

One module, so that whatever wraps the model (FSDP's gathering hooks above all) also covers the
head's weight, which the loss reads outside the decoder's own forward.
"""

from __future__ import annotations

# B batch, S sequence, D hidden, V vocabulary
from torch import Tensor, nn

from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.model.attention_backend import AttentionBackend, CausalAttention, PackedAttention
from fivefold.model.decoder import Decoder


class Objective(nn.Module):
    """Next-token cross-entropy. Returns the SUM over targets: the caller knows the global count."""

    def __init__(self, decoder: Decoder, *, z_loss: float = 0.0, chunk: int = 512) -> None:
        super().__init__()
        self.decoder = decoder
        self.z_loss = z_loss
        self.chunk = chunk

    def forward(
        self, tokens: Tensor, labels: Tensor, positions: Tensor, documents: Tensor | None
    ) -> Tensor:
        """[B,S] int64 each; labels of -100 have no target. Returns the fp32 loss sum."""
        attention: AttentionBackend = (
            CausalAttention() if documents is None else PackedAttention(documents)
        )
        hidden = self.decoder(tokens, positions, attention)
        return linear_cross_entropy(
            hidden.flatten(0, 1),
            self.decoder.head_weight(),
            labels.flatten(),
            softcap=self.decoder.config.logit_softcap,
            z_loss=self.z_loss,
            chunk=self.chunk,
        )
