"""Runs a step function once without data, and writes down what it does."""
