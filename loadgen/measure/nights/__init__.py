"""Nightly records: what a night stores, its verdict, trends and the speed of the machine."""
