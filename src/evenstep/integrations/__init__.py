"""evenstep inside other libraries' trainers; each module needs its library, an optional extra."""
