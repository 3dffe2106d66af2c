"""The private parts of torch that we need, in one place, and what differs between torch 2.11 and 2.13."""
