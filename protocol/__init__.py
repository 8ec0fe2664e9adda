"""What crosses a process boundary: ids, HTTP bodies, rollout and batch records. Leaf."""
