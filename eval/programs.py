"""Compiled programs of a long run, so that there are never too many for one process."""

import jax

MOST = 40_000  # of the 65,530 maps that Linux lets a process have


def maps() -> int:
    """How many memory maps this process has; 0 where the system does not say."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def forget() -> None:
    """Forgets compiled programs where there are many.

    XLA for the CPU maps memory for each, and dies where no more can be had: a run of twenty recipes
    at four budgets comes that far. What is needed again is read from the compilation cache.
    """
    if maps() > MOST:
        jax.clear_caches()
