"""The running system: rollout, trainer, controller and the processes they live in."""
