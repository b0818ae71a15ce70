"""Evaluation: speed, tasks, and reports about them."""
