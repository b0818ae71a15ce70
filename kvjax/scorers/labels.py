"""Labels: a number for each head, found once for a model, whatever the text."""

import jax.numpy as jnp

from kvjax import struct
from kvjax.errors import InputError
from kvjax.scorers.seen import Seen
from kvjax.shapes import Array, Float


@struct.dataclass
class Labels:
    """Keeps every token of the heads with the highest labels; the others keep sinks and a window.

    Labels come in `model.tables[recipe.name] = {"scorer": {"label": [l n]}}`, from a calibration.
    Source: Kim et al. 2025, arXiv:2505.23416 (KVzip), section 4.3 (head level).
    """

    label: Float[Array, "n"] | None = None  # of one layer

    def __call__(self, seen: Seen):
        if self.label is None:
            raise InputError(
                "this recipe needs labels of heads: calibrate them and put them into model.tables"
            )
        heads = seen.pos.shape[1]
        if self.label.shape != (heads,):
            raise InputError(
                f"labels of a layer have shape {self.label.shape} and the model {heads} kv heads; "
                "use those made for this model"
            )
        return jnp.broadcast_to(self.label[None, :, None], seen.pos.shape).astype(jnp.float32)
