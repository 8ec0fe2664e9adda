"""What people see of a run: console lines and W&B series."""
