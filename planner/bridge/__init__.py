"""Turn a recorded step into a solver's problem, and a solver's answer back into calls; knows both, runs no model."""
