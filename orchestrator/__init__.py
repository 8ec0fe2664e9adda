"""Decides and drives a run: groups, weight versions, rollouts, batches. No torch, no vLLM."""
