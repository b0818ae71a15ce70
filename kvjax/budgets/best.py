"""The best entries: of each head (`top`), and of several axes together."""

import jax.numpy as jnp
import numpy as np

from kvjax.cache.select import top

__all__ = ["shared", "top"]


def shared(scores, valid, protected, pos, count, axes):
    """The best `count` [..] of the last `axes` axes together; ties by position, then by head."""
    lead, last = scores.shape[:-axes], scores.shape[-axes:]
    flat = lambda x: x.reshape(*lead, -1)  # noqa: E731
    heads = int(np.prod(last[:-1]))
    order = pos * heads + jnp.arange(heads).reshape(*last[:-1], 1)  # unique over the pool
    keep = top(flat(scores), flat(valid), flat(protected), flat(order), count)
    return keep.reshape(scores.shape)
