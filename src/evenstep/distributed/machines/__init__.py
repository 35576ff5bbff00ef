"""Processes on several machines: who is on which, and how little crosses the cables between."""
