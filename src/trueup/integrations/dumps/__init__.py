"""Readers of recorded tokens: runs of trueup, and what other trainers write."""
