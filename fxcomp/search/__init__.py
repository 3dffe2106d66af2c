"""Choose a plan: the workload of a graph, candidates, and the tasks that price them."""
