"""Dynamic programmes over a chain of stages, flat and nested; knows problems and tables, no linear programming."""
