"""Judge the search: find the best plan of a small workload exactly, and for any size a bound that no plan beats.

oracle ─► space (buckets that may be) ─► labels (partial plans) ─► rest (what they still cost at least)
bound  ─► least_work (lines below every price)

The search imports nothing from here.
"""
