"""Search for a plan: solve, dry-run, try for real; knows all rooms but showing."""
