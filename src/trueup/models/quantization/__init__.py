"""Coarser grids for the rollout forward: numbers, schemes, layers, and the trainer's imitation."""
