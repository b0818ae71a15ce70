"""Compiles the decoding functions for TPUs that are not here, and prints what they need, as JSON.

Run as a process of its own, `python aot_program.py CASE...`: libtpu must not be loaded where tests
run. A case is recipe:head_dim:function:chips. Shapes only; nothing is allocated.
"""

import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # it only compiles: no chip is shared

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import kvjax  # noqa: E402
from kvjax import sharding  # noqa: E402
from kvjax.config import LayerKind, ModelConfig  # noqa: E402
from kvjax.params import abstract_params  # noqa: E402

ROWS, LENGTH = 4, 8192
RECIPES = {
    "exact": kvjax.recipe("exact"),
    "int8": kvjax.recipe("int8"),
    "scored": kvjax.recipe("key_norm", when="during"),
    "streaming": kvjax.recipe("streaming_llm"),
    "snapkv": kvjax.recipe("snapkv"),
    "snapkv_int8": kvjax.recipe("snapkv", codec="int8"),
    "pooled": kvjax.recipe("ada_snapkv"),
    "pooled_wide": kvjax.recipe("ada_snapkv", page=128),
}


def config(head_dim):
    """The cache of an 8B model of 32 layers and 8 kv heads; thin weights, so that they do not hide
    it."""
    return ModelConfig(
        "llama", vocab=1024, width=512, mlp=512, heads=16, kv_heads=8, head_dim=head_dim,
        kinds=(LayerKind(),), pattern=(0,) * 32, context=131072, dtype="bfloat16",
    )  # fmt: skip


def mesh_of(chips):
    """One v5e, or four as 2 x 2. Another process may hold libtpu's lock: waits up to a minute."""
    one = dict(topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1))
    for _ in range(30):
        try:
            found = topologies.get_topology_desc(
                platform="tpu", **(one if chips == 1 else dict(topology_name="v5e:2x2"))
            )
            break
        except Exception as error:  # jaxlib names no narrower one
            if "lockfile" not in str(error):
                raise
            time.sleep(2)
    devices = np.array(found.devices[:chips]).reshape((1, 1) if chips == 1 else (2, 2))
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def compiled(recipe, head_dim, function, mesh):
    c, rows = config(head_dim), sharding.RULES.batch

    def shapes(tree, specs):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)),
            tree, specs,
        )  # fmt: skip

    def ids(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P(rows)))

    cache = kvjax.abstract_cache(c, RECIPES[recipe], ROWS, LENGTH, length=7168)
    weights = abstract_params(c)
    cache = shapes(cache, kvjax.cache_specs(cache, mesh))
    weights = shapes(weights, sharding.param_specs(weights, mesh))
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, P()))
    new = jax.eval_shape(
        lambda p, x: kvjax.look(p, c, None, x)[1], weights, jax.ShapeDtypeStruct((ROWS, 4), int)
    )
    new = shapes(new, jax.tree.map(lambda _: P(None, rows, None, sharding.RULES.rows), new))
    calls = {
        "step": (lambda x, p, t: kvjax.step(p, c, x, t), weights, ids(ROWS, 1)),
        "decode": (lambda x, p, t, k: kvjax.decode(p, c, x, t, k, steps=70), weights, ids(ROWS),
                   key),
        "append": (kvjax.append, new, ids(ROWS)),
        "compress": (kvjax.compress,),
    }  # fmt: skip
    call, *more = calls[function]
    with jax.set_mesh(mesh):
        return cache, jax.jit(call, donate_argnums=0).lower(cache, *more).compile()


def figures(recipe, head_dim, function, chips):
    """Bytes a chip, and the collectives whose result is as large as a layer of a cache leaf."""
    mesh = mesh_of(chips)
    cache, program = compiled(recipe, head_dim, function, mesh)
    memory, text = program.memory_analysis(), program.as_text()
    mine = [
        int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for x in jax.tree.leaves(cache)
    ]
    head = text[: text.index("\n")]
    pairs = head.count("may-alias") + head.count("must-alias")
    return dict(
        cache=sum(mine), leaves=len(mine), aliased_leaves=pairs,
        alias=memory.alias_size_in_bytes, output=memory.output_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        gathers=[
            line.strip()[:200]
            for line in text.splitlines()
            if "= " in line and any(f" {op}(" in line for op in ("all-gather", "all-gather-start"))
        ],
    )  # fmt: skip


if __name__ == "__main__":
    for case in sys.argv[1:]:
        name, head_dim, function, chips = case.split(":")
        begin = time.perf_counter()
        made = figures(name, int(head_dim), function, int(chips))
        print(json.dumps(dict(made, case=case, seconds=time.perf_counter() - begin)), flush=True)
