"""Groups: the processes that train together, one alone or several that a launcher has started."""
