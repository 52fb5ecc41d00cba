"""Put a plan onto a model and replay its segments exactly; knows models and plans, not budgets, profiles or solvers."""
