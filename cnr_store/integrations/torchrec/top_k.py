"""The largest values of pooled embeddings through TorchRec's all-to-all, as codecs of its quantized communication.

TorchRec has codecs turn what it sends into other numbers of bytes. It passes them flat tensors, without the widths of
their rows, and nothing of the forward pass in the backward pass. So values are chosen among so many after each other,
and the gradient's are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from cnr_store.communication import TopKActivations
from cnr_store.errors import BadInput, BadShape


def top_k_codecs(layer: TopKActivations, dim: int) -> dict[str, QuantizedCommCodecs]:
    """Return what ``EmbeddingBagCollectionSharder(qcomm_codecs_registry=)`` takes to send only the largest values.

    It changes the exchange of pooled outputs of whole tables and of columns of tables. What a rank keeps of its own
    outputs is cut in the same way. Row-wise tables send partial sums, by another exchange, which stays as it is.

    Parameters
    ----------
    layer
        How many values, and of which type; with ``backward="whole"`` gradients go back whole, in float32. TorchRec's
        codecs cannot do ``"mask"``: `BadInput`. Its ``group`` is not used.
    dim
        Values among which the largest are chosen: the tables' dimension, or a common divisor of their dimensions and
        those of their column shards. Another number raises `BadShape` in the first forward pass.

    Examples
    --------
    ``EmbeddingBagCollectionSharder(qcomm_codecs_registry=top_k_codecs(TopKActivations(keep=0.4), dim=64))``
    """
    if layer.backward_mode == "mask":
        raise BadInput(
            "backward='mask' sends the gradient of the values that were sent forward, which TorchRec's codecs do not "
            "know in the backward pass; use 'own' or 'whole'",
            found="mask",
        )
    codec = _LargestValues(layer, dim)
    codecs = QuantizedCommCodecs(forward=codec)
    if layer.backward_mode == "own":
        codecs.backward = codec
    return {CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name: codecs}


@dataclass(frozen=True)
class _LargestValues:
    """Of each ``dim`` values, the message of a `TopKActivations`. The methods are those of TorchRec's codecs."""

    layer: TopKActivations
    dim: int

    quantized_dtype = torch.uint8

    def encode(self, values: torch.Tensor, _context: None = None) -> torch.Tensor:
        """Return the messages of float values of any shape, end to end: ``(bytes,)`` uint8."""
        return self.layer.encode(values.reshape(-1, self.dim).float())[0].flatten()

    def decode(self, messages: torch.Tensor, _context: None = None) -> torch.Tensor:
        """Return the values of messages, ``(values,)`` float32."""
        return self.layer.decode(messages.view(-1, self.layer.row_bytes(self.dim)), self.dim)[0].flatten()

    def calc_quantized_size(self, num_values: int, _context: None = None) -> int:
        """Return the bytes of so many values."""
        return num_values // self.dim * self.layer.row_bytes(self.dim)

    def create_context(self) -> None:
        """Nothing is carried from encoding to decoding."""

    def padded_size(self, values: torch.Tensor, widths: Sequence[int], _rank: int, _context: None) -> tuple[int, int]:
        """Return the width of a rank's outputs, and 0: nothing is padded."""
        if wrong := [width for width in widths if width % self.dim]:
            raise BadShape(
                f"dim={self.dim} must divide the width of what each rank sends, found {wrong[0]}; use a common divisor "
                "of the dimensions of all tables and column shards",
                expected=self.dim, found=wrong[0],
            )  # fmt: skip
        return values.shape[-1], 0
