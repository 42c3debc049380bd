"""Recorded agents: conversations with tools, pauses and subagents, as trees of requests."""
