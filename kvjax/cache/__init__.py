"""The compressed cache: an exact tail, compressed bodies, and what changes them."""
