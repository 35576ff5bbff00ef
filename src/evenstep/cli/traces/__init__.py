"""`evenstep explain`: reads a trace, and says where its time went."""
