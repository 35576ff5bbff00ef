"""Companions to Dive into Deep Learning: its names, its experiments, the classic all-reduces."""
