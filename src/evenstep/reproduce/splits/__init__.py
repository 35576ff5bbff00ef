"""The three ways to split a network: measured, calculated for other links, and as a table."""
