"""Say what one rank holds of a recorded step; knows records and bytes, nothing of plans or solvers."""
