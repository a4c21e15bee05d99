"""Engines: run a batch through schedule and program, microbatch by microbatch."""
