"""Weights from one sender to many receivers: an abortable process group, buckets, digests. Leaf."""
