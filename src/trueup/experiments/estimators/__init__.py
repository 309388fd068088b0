"""The estimator lab: what every correction leaves of bias and variance, where both are known."""
