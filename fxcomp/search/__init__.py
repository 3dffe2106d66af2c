"""Choose a plan: the workload of a graph, candidates, and their simulation."""
