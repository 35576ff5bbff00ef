"""Symbols: what a network computes, recorded as a program without computing it."""
