"""Judge the search: find the best plan of a small workload exactly, and for any size a bound that no plan beats.

oracle ─► space (buckets that may be) ─► labels (partial plans) ─► rest (what they still cost at least)
one_wire ─► space (where only one wire is busy: a dozen gradients in a second)
bound  ─► least_work (lines below every price)

The search imports nothing from here.
"""
