"""Computations of two processes together, compared with those of one."""
