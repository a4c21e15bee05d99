"""Runs microbatches from a list of calls that earlier ones were seen to make, without the script's Python."""
