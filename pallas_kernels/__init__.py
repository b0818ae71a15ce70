"""Faster twins of code in kvjax: operations on arrays, each with a plain jnp reference."""
