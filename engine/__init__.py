"""What we add to vLLM, through its own plugin points: gate, identity, version, weight receiver."""
