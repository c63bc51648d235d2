"""Model families: configs, and the graphs built from them. Imports weights, graph and core."""
