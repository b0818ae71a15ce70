"""kvjax as an engine: `prefill` and the compiled `decode` under donation."""

import importlib.metadata
import time

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache import spelling

ARRAY_BYTES = 512 << 20  # bandwidth is measured with: far more than a core's cache
SIDE = 2048  # of the square matrices that arithmetic is measured with
TRIES = 8


class Engine:
    """A model of kvjax on the CPU."""

    def __init__(self, job):
        names = ("jax", "jaxlib", "numpy")
        self.versions = {name: importlib.metadata.version(name) for name in names}
        self.versions["kvjax"] = kvjax.__version__
        if job["task"] == "machine":
            return
        if job["task"] == "memory":  # compilation is part of what is measured
            jax.config.update("jax_enable_compilation_cache", False)
        self.model = kvjax.load(job["model"], dtype="float32")
        self.recipes = {word: spelling.parse(word) for word in job["recipes"]}
        config = self.model.config
        self._run = jax.jit(
            lambda params, cache, token, key, steps: kvjax.decode(
                params, config, cache, token, key, steps=steps
            ),
            static_argnames="steps",
            donate_argnames="cache",
        )

    def prefill(self, ids, room, recipe):
        """(next token, cache) after the ids."""
        ids = np.asarray([ids], np.int32)
        logits, cache = kvjax.prefill(
            self.model, ids, self.recipes[recipe], max_length=ids.shape[1] + room
        )
        return jax.block_until_ready((jnp.argmax(jnp.asarray(logits), axis=-1), cache))

    def fork(self, state):
        return jax.block_until_ready(kvjax.fork(state))

    def decode(self, state, steps):
        """All steps in one compiled loop."""
        token, cache = state
        made, cache = self._run(self.model.params, cache, token, jax.random.key(0), steps=steps)
        return (made[:, -1], cache), np.asarray(made)[0].tolist()

    def sizes(self, state):
        """Bytes that a token reads; an output matrix of its own leaves the embedding unread."""
        params, config = self.model.params, self.model.config
        weights = kvjax.nbytes(params) - (0 if params.head is None else kvjax.nbytes(params.embed))
        blocks = sum(x.size for x in jax.tree.leaves(params.blocks))
        attention = 4 * config.layers * config.heads * config.head_dim
        return {
            "weight_bytes": weights,
            "cache_bytes": kvjax.nbytes(state[1]),
            "flops_per_token": 2 * blocks,
            "flops_per_pair": attention,  # of a query and a key that it sees
        }

    def machine(self):
        """The best of several tries: a sum and a matrix-vector product; a matrix product."""
        rows = ARRAY_BYTES // 4 // 1024
        a, x = jnp.ones((rows, 1024)), jnp.ones((1024,))
        seconds = min(_best(jax.jit(jnp.sum), a), _best(jax.jit(jnp.matmul), a, x))
        b = jnp.ones((SIDE, SIDE))
        return {
            "bytes_per_s": ARRAY_BYTES / seconds,
            "flops_per_s": 2 * SIDE**3 / _best(jax.jit(jnp.matmul), b, b),
        }


def _best(function, *arrays):
    jax.block_until_ready(function(*arrays))
    times = []
    for _ in range(TRIES):
        started = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        times.append(time.perf_counter() - started)
    return min(times)
