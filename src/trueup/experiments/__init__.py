"""Experiments: a claim, how it is tested, and the source's figures beside ours."""
