"""The threshold budget, by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import budgets
from kvjax.config import Spec


def test_threshold_by_hand():
    """Two layers of one head; tau 2 keeps 3, 2, 5, 4 and the protected 0, of which 3 fit."""
    scores = jnp.asarray([[[[0.0, 3.0, 1.0]]], [[[2.0, 5.0, 4.0]]]])
    pos = jnp.broadcast_to(jnp.arange(3), scores.shape)
    valid = jnp.ones(scores.shape, bool)
    first = jnp.asarray([[[[True, False, False]]], [[[False] * 3]]])
    budget = budgets.build(Spec("threshold", (("tau", 2.0),)))
    keep = jax.jit(budget)
    for count, want, over in (
        (9, [[1, 1, 0], [1, 1, 1]], False),
        (5, [[1, 1, 0], [1, 1, 1]], False),
        (3, [[1, 0, 0], [0, 1, 1]], True),
    ):
        args = scores, valid, first, pos, jnp.asarray([count])
        assert np.asarray(keep(*args))[:, 0, 0].tolist() == [[bool(x) for x in r] for r in want]
        assert np.asarray(budget.over(*args)).tolist() == [over]
    nan = scores.at[1, 0, 0, 1].set(jnp.nan)
    assert not keep(nan, valid, first, pos, jnp.asarray([9]))[1, 0, 0, 1]
