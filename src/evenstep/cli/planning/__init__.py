"""`evenstep plan`: what more devices would bring."""
