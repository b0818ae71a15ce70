"""The checker that jaxtyping calls while tests run."""

import beartype


def functions_only(function):
    """Checks arguments and results of functions, and leaves the fields of pytrees unchecked.

    jax rebuilds a pytree from slices, specs and placeholders whenever it maps over one, so a check
    in `__init__` would refuse `jax.tree.map`, `scan`, `vmap` and `eval_shape`.
    """
    return function if function.__name__ == "__init__" else beartype.beartype(function)
