"""Pure statistics of a policy gap."""
