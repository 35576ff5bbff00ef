"""Nested dicts and lists with another value at one of their places."""


def places(value, path=()):
    """Yield the path of every value inside nested dicts and lists."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def put(value, path, odd):
    """Return a copy with another value at `path`."""
    if not path:
        return odd
    copied = value.copy()
    copied[path[0]] = put(value[path[0]], path[1:], odd)
    return copied


def left_out(value, path):
    """Return a copy without the value at `path`."""
    *outer, last = path
    if outer:
        return put(value, path[:1], left_out(value[path[0]], path[1:]))
    copied = value.copy()
    del copied[last]
    return copied
