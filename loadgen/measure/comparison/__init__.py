"""Comparison of two sides (paired runs, several runs, single runs), and its verdict."""
