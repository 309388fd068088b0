"""Policies: loading, building, scoring, rendering."""
