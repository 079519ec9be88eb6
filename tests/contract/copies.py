"""Copies."""
