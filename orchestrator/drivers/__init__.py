"""Async I/O that feeds the plane and carries out its commands."""
