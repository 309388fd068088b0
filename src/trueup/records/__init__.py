"""The run's records: ledger, episode table, manifest, audit."""
