"""Engines that `kvjax bench speed` measures in turns; each turn is a process of its own."""
