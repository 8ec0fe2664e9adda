"""Environments, generation client, dispatch, staleness and batches."""
